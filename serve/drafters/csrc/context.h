// A request's own text, prompt and output, and where in it the last tokens occurred before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace ngram {

// An earlier place in a text that ends like the text.
struct Occurrence {
  uint32_t next;    // index of the token that followed
  uint32_t length;  // how many tokens before it equal the last ones
};

// Earlier occurrences of the last `gram` tokens, newest first: for every gram the last index that it ends at, and for
// every index the one before. Open addressing; a slot's gram is read in the text itself.
class GramIndex {
 public:
  explicit GramIndex(uint32_t gram) : gram_(gram) {}
  // The text has grown: takes in the grams that end at its new tokens.
  void extend(const std::vector<int32_t>& text);
  // Fetch what `extend` will read: first where it writes and the slots, then what these point to.
  void prefetch_slots(const std::vector<int32_t>& text) const;
  void prefetch_grams(const std::vector<int32_t>& text) const;
  // Fetches what the search reads at the occurrence that has `newer` ones before it, once these are fetched.
  void prefetch_occurrence(const std::vector<int32_t>& text, uint32_t newer) const;
  // Index at which the gram at the end of the text ended last; NOWHERE if it is new.
  uint32_t latest() const { return previous_.empty() ? NOWHERE : previous_.back(); }
  uint32_t before(uint32_t index) const { return previous_[index]; }
  size_t bytes() const { return (previous_.capacity() + slots_.capacity()) * sizeof(uint32_t); }
  void clear();

  static constexpr uint32_t NOWHERE = UINT32_MAX;

 private:
  void add(const std::vector<int32_t>& text, uint32_t index);
  uint32_t* slot(const std::vector<int32_t>& text, uint32_t index);
  // Where the search for the slot of the gram that ends at `index` begins.
  size_t home(const std::vector<int32_t>& text, uint32_t index) const;
  // The first index that is not taken in and ends a gram.
  uint32_t next() const { return std::max(static_cast<uint32_t>(previous_.size()), gram_ - 1); }
  void grow(const std::vector<int32_t>& text);

  uint32_t gram_;
  uint32_t num_used_ = 0;
  std::vector<uint32_t> previous_;  // by index
  std::vector<uint32_t> slots_;     // a power of two of them; last index of a gram
};

class Context {
 public:
  Context(uint32_t min_match, uint32_t max_match);
  // Adds tokens to the text. `index` must follow before the next `search`.
  void append(const int32_t* tokens, const int32_t* end) { text_.insert(text_.end(), tokens, end); }
  void index();
  // Fetch what these will read, one behind the other; see GramIndex.
  void prefetch_end() const { prefetch(text_.data() + text_.size()); }
  void prefetch_slots() const;
  void prefetch_grams() const;
  void prefetch_search(uint32_t newer) const;
  void clear();
  const std::vector<int32_t>& text() const { return text_; }
  size_t bytes() const { return text_.capacity() * sizeof(int32_t) + rare_.bytes() + common_.bytes(); }

  // At most `count` earlier occurrences of the longest end of the text, longest first, then newest first.
  void search(uint32_t count, std::vector<Occurrence>& found) const;

 private:
  void collect(const GramIndex& index, std::vector<Occurrence>& found) const;
  uint32_t common_length(uint32_t index) const;

  uint32_t min_match_, max_match_;
  std::vector<int32_t> text_;
  GramIndex rare_, common_;  // of a longer and of the shortest match
};

}  // namespace ngram
