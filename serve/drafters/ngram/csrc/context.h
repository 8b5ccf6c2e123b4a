// A request's own text, prompt and output, and where in it the last tokens occurred before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace ngram {

// An earlier place in a text whose last tokens equal the end of the text.
struct Occurrence {
  uint32_t next;    // index of the token that followed
  uint32_t length;  // how many tokens before it equal the last ones
};

// Earlier occurrences of the last `gram` tokens, newest first: for every gram the last index where it ends, and for
// every index the previous one. Open addressing; a slot's gram is read in the text itself.
class GramIndex {
 public:
  explicit GramIndex(uint32_t gram) : gram_(gram) {}
  // Indexes the grams that end at new tokens of the text.
  void extend(const std::vector<int32_t>& text);
  // Prefetch what `extend` reads: first its end and the slots, then the text that these point to.
  void prefetch_slots(const std::vector<int32_t>& text) const;
  void prefetch_grams(const std::vector<int32_t>& text) const;
  // Prefetches what the search reads at occurrence number `newer`; the ones before it must be fetched.
  void prefetch_occurrence(const std::vector<int32_t>& text, uint32_t newer) const;
  // Index where the last gram of the text ended before; NOWHERE if it is new.
  uint32_t latest() const { return previous_.empty() ? NOWHERE : previous_.back(); }
  uint32_t before(uint32_t index) const { return previous_[index]; }
  size_t bytes() const { return (previous_.capacity() + slots_.capacity()) * sizeof(uint32_t); }
  void clear();

  static constexpr uint32_t NOWHERE = UINT32_MAX;

 private:
  void add(const std::vector<int32_t>& text, uint32_t index);
  uint32_t* slot(const std::vector<int32_t>& text, uint32_t index);
  // Start of the probe for the slot of the gram that ends at `index`.
  size_t home(const std::vector<int32_t>& text, uint32_t index) const;
  // The first index that ends a gram and is not indexed.
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
  // Prefetch what these read, one after the other; see GramIndex.
  void prefetch_end() const { prefetch(text_.data() + text_.size()); }
  void prefetch_slots() const;
  void prefetch_grams() const;
  void prefetch_search(uint32_t newer) const;
  void clear();
  const std::vector<int32_t>& text() const { return text_; }
  size_t bytes() const { return text_.capacity() * sizeof(int32_t) + rare_.bytes() + common_.bytes(); }

  // At most `count` earlier occurrences of the text's last tokens, longest match first, then newest first.
  void search(uint32_t count, std::vector<Occurrence>& found) const;

 private:
  void collect(const GramIndex& index, std::vector<Occurrence>& found) const;
  uint32_t common_length(uint32_t index) const;

  uint32_t min_match_, max_match_;
  std::vector<int32_t> text_;
  GramIndex rare_, common_;  // of a longer and of the shortest match
};

}  // namespace ngram
