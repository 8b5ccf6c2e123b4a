// Prefetches what a batch's lookups will read, for all requests at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "history.h"
#include "trie.h"

namespace ngram {

// In a large trie every step of a lookup waits for memory and only then knows the next address. The requests of a batch
// are independent, so each step is prefetched for all of them before the next one is read.
class WarmUp {
 public:
  WarmUp(const Trie& trie, uint32_t max_match, uint32_t breadth)
      : trie_(trie), max_match_(max_match), breadth_(breadth) {}

  void clear();
  // Notes the tokens of `text` that its history has not followed yet; returns how many.
  size_t add(const History& history, const std::vector<int32_t>& text);
  // Prefetches what following them reads. Returns the first node of each one's branch, in order.
  const std::vector<uint32_t>& steps();
  // After that: notes what follows the matches, and prefetches what drafting it reads.
  void add_match(const History& history);
  void drafts();

 private:
  // A token, and the one after it.
  struct Pair {
    uint32_t root;
    int32_t token;
    int32_t next;  // NO_TOKEN: the text ends
  };
  // A place of a history, and the next token.
  struct Reached {
    uint32_t node;
    int32_t next;
  };
  void prefetch_below(uint32_t id, int32_t next) const;
  void prefetch_hashed(uint32_t id, int32_t next) const;

  const Trie& trie_;
  uint32_t max_match_, breadth_;
  std::vector<Pair> pairs_;
  std::vector<Reached> reached_;
  std::vector<uint32_t> firsts_;    // for each pair
  std::vector<uint32_t> siblings_;  // one for each match that may be drafted from
  std::vector<uint32_t> chunks_;
};

}  // namespace ngram
