// Brings what a batch's lookups will read into the cache, for all requests at once.
#pragma once

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

  // A new batch.
  void clear() {
    pairs_.clear();
    nodes_.clear();
    chunks_.clear();
  }
  // The tokens of `text` that its history has not followed yet.
  void add(const History& history, const std::vector<int32_t>& text);
  // What following them will read.
  void steps();
  // What drafting behind the longest match will read, now that they are followed.
  void add_match(const History& history);
  void drafts();

 private:
  // A token, and the one after it.
  struct Pair {
    uint32_t root;
    int32_t token;
    int32_t next;  // NO_TOKEN: the text ends
  };
  void prefetch_below(uint32_t id, int32_t next) const;

  const Trie& trie_;
  uint32_t max_match_, breadth_;
  std::vector<Pair> pairs_;
  std::vector<uint32_t> nodes_;
  std::vector<uint32_t> chunks_;
};

}  // namespace ngram
