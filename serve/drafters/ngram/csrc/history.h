// Where a request's last tokens occur in the trie: one place for each length, advanced token by token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trie.h"

namespace ngram {

constexpr uint32_t MAX_HISTORIES = 2;  // of a request: of its own namespace and of a common one

class History {
 public:
  void begin(uint32_t name);
  // Follows the new tokens of `text` and keeps the places that have a continuation. `firsts`: for each of these tokens,
  // from `next` on, the first node of its branch, or NONE.
  void advance(const Trie& trie, const std::vector<int32_t>& text, uint32_t max_match, const uint32_t* firsts);
  // Longest first, settled.
  const std::vector<Place>& places() const { return places_; }
  uint32_t name() const { return name_; }
  // Index of the first token of `text` that `advance` will follow.
  size_t next(const std::vector<int32_t>& text, uint32_t max_match) const;

 private:
  uint32_t name_ = 0;  // number of the namespace
  size_t seen_ = 0;    // tokens followed so far
  std::vector<Place> places_;
};

}  // namespace ngram
