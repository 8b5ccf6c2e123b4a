// Brings what a batch's lookups will read into the cache, for all requests at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "history.h"
#include "trie.h"

namespace ngram {

// In a large trie every step of a lookup waits for memory, and it knows the next address only then. The requests of a
// batch do not depend on each other: each step is requested for all of them before the next one is looked at.
// Changes nothing that can be seen.
class WarmUp {
 public:
  WarmUp(const Trie& trie, uint32_t max_match, uint32_t breadth)
      : trie_(trie), max_match_(max_match), breadth_(breadth) {}

  void clear();
  // Notes the tokens of `text` that its history has not followed yet, and from where; returns how many there are.
  size_t add(const History& history, const std::vector<int32_t>& text);
  // Fetches what following them will read. Returns the node with which a branch begins for each of them, in order.
  const std::vector<uint32_t>& steps();
  // Notes, when they are followed, what lies behind the matches; fetches what drafting it will read.
  void add_match(const History& history);
  void drafts();

 private:
  // A token, and the one after it.
  struct Pair {
    uint32_t root;
    int32_t token;
    int32_t next;  // NO_TOKEN: the text ends
  };
  // A place of a history, and the token that it is to be followed by.
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
