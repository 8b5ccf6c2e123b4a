#include "history.h"

#include <algorithm>

namespace ngram {

namespace {

// Keeps, in order, the places for which `is_kept`, which may move them.
template <class Kept>
void filter(std::vector<Place>& places, const Kept& is_kept) {
  size_t count = 0;
  for (Place& place : places) {
    if (is_kept(place)) places[count++] = place;
  }
  places.resize(count);
}

}  // namespace

void History::begin(uint32_t name) {
  name_ = name;
  seen_ = 0;
  places_.clear();
}

size_t History::next(const std::vector<int32_t>& text, uint32_t max_match) const {
  return std::max(seen_, text.size() - std::min<size_t>(text.size(), max_match));
}

void History::advance(const Trie& trie, const std::vector<int32_t>& text, uint32_t max_match,
                      const uint32_t* firsts) {
  const size_t start = next(text, max_match);
  if (start > seen_) places_.clear();
  seen_ = text.size();
  for (size_t index = start; index < text.size(); ++index) {
    const int32_t* end = text.data() + index;
    filter(places_, [&](Place& place) { return place.depth < max_match && trie.step(place, *end, end); });
    const uint32_t first = firsts[index - start];
    if (first != NONE) places_.push_back({first, trie.nodes()[first].birth, 1});
  }
  const int32_t* end = text.data() + text.size();
  filter(places_, [&](Place& place) { return trie.settle(place, end) && trie.continues(place); });
}

}  // namespace ngram
