#include "context.h"

#include <algorithm>

namespace ngram {

namespace {

// A frequent gram of the shortest length hides long matches that lie far back, so a longer one is looked up as well.
constexpr uint32_t LONG_GRAM = 3;
constexpr uint32_t MAX_VISITED = 16;
constexpr size_t MIN_SLOTS = 1024;

}  // namespace

void GramIndex::extend(const std::vector<int32_t>& text) {
  while (previous_.size() < text.size()) add(text, static_cast<uint32_t>(previous_.size()));
}

void GramIndex::add(const std::vector<int32_t>& text, uint32_t index) {
  if (index + 1 < gram_) return previous_.push_back(NOWHERE);
  if ((num_used_ + 1) * uint64_t{4} > slots_.size() * uint64_t{3}) grow(text);
  uint32_t* last = slot(text, index);
  num_used_ += *last == NOWHERE;
  previous_.push_back(*last);
  *last = index;
}

void GramIndex::clear() {
  previous_.clear();
  slots_.clear();
  num_used_ = 0;
}

void GramIndex::prefetch_slots(const std::vector<int32_t>& text) const {
  prefetch(previous_.data() + previous_.size());
  if (slots_.empty()) return;
  for (uint32_t index = next(); index < text.size(); ++index) prefetch(&slots_[home(text, index)]);
}

void GramIndex::prefetch_grams(const std::vector<int32_t>& text) const {
  if (slots_.empty()) return;
  for (uint32_t index = next(); index < text.size(); ++index) {
    const uint32_t last = slots_[home(text, index)];
    if (last != NOWHERE) prefetch(&text[last]);
  }
}

void GramIndex::prefetch_occurrence(const std::vector<int32_t>& text, uint32_t newer) const {
  uint32_t index = latest();
  for (; newer > 0 && index != NOWHERE; --newer) index = before(index);
  if (index == NOWHERE) return;
  prefetch(&text[index]);
  prefetch(&previous_[index]);
}

size_t GramIndex::home(const std::vector<int32_t>& text, uint32_t index) const {
  const int32_t* end = text.data() + index + 1;
  uint64_t hash = HASH_SECRET;
  for (const int32_t* token = end - gram_; token != end; ++token) {
    hash = (hash ^ static_cast<uint32_t>(*token)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return hash & (slots_.size() - 1);
}

// The slot of the gram that ends at `index`, or the empty one where it belongs.
uint32_t* GramIndex::slot(const std::vector<int32_t>& text, uint32_t index) {
  const int32_t* end = text.data() + index + 1;
  for (size_t probe = home(text, index);; probe = (probe + 1) & (slots_.size() - 1)) {
    if (slots_[probe] == NOWHERE) return &slots_[probe];
    const int32_t* other = text.data() + slots_[probe];
    uint32_t back = 0;  // compared here and not by a library's function: grams are two or three tokens long
    while (back < gram_ && end[-1 - static_cast<ptrdiff_t>(back)] == other[-static_cast<ptrdiff_t>(back)]) ++back;
    if (back == gram_) return &slots_[probe];
  }
}

void GramIndex::grow(const std::vector<int32_t>& text) {
  std::vector<uint32_t> old(std::max(MIN_SLOTS, slots_.size() * 2), NOWHERE);
  old.swap(slots_);
  for (const uint32_t index : old) {
    if (index != NOWHERE) *slot(text, index) = index;
  }
}

Context::Context(uint32_t min_match, uint32_t max_match)
    : min_match_(min_match),
      max_match_(max_match),
      rare_(std::max(min_match, std::min(LONG_GRAM, max_match))),
      common_(min_match) {}

void Context::index() {
  rare_.extend(text_);
  common_.extend(text_);
}

void Context::prefetch_slots() const {
  rare_.prefetch_slots(text_);
  common_.prefetch_slots(text_);
}

void Context::prefetch_grams() const {
  rare_.prefetch_grams(text_);
  common_.prefetch_grams(text_);
}

void Context::prefetch_search(uint32_t newer) const {
  rare_.prefetch_occurrence(text_, newer);
  common_.prefetch_occurrence(text_, newer);
}

void Context::clear() {
  text_.clear();
  rare_.clear();
  common_.clear();
}

void Context::search(uint32_t count, std::vector<Occurrence>& found) const {
  found.clear();
  collect(rare_, found);
  collect(common_, found);
  const auto better = [](const Occurrence& a, const Occurrence& b) {
    return a.length != b.length ? a.length > b.length : a.next > b.next;
  };
  std::sort(found.begin(), found.end(), better);
  const auto same = [](const Occurrence& a, const Occurrence& b) { return a.next == b.next; };
  found.erase(std::unique(found.begin(), found.end(), same), found.end());
  if (found.size() > count) found.resize(count);
}

void Context::collect(const GramIndex& index, std::vector<Occurrence>& found) const {
  uint32_t earlier = index.latest();
  for (uint32_t visited = 0; visited < MAX_VISITED && earlier != GramIndex::NOWHERE; ++visited) {
    found.push_back({earlier + 1, common_length(earlier)});
    earlier = index.before(earlier);
  }
}

// How many tokens up to `index` equal the last ones of the text.
uint32_t Context::common_length(uint32_t index) const {
  const uint32_t limit = std::min(max_match_, index + 1);
  const auto earlier = text_.rend() - index - 1;  // backwards from `index`
  return static_cast<uint32_t>(std::mismatch(earlier, earlier + limit, text_.rbegin()).first - earlier);
}

}  // namespace ngram
