#include "history.h"

#include <algorithm>

namespace ngram {

void History::begin(uint32_t name) {
  name_ = name;
  seen_ = 0;
  places_.clear();
}

size_t History::next(const std::vector<int32_t>& text, uint32_t max_match) const {
  return std::max(seen_, text.size() - std::min<size_t>(text.size(), max_match));
}

void History::advance(const Trie& trie, const std::vector<int32_t>& text, uint32_t max_match) {
  const size_t start = next(text, max_match);
  if (start > seen_) places_.clear();
  seen_ = text.size();
  for (size_t index = start; index < text.size(); ++index) {
    const int32_t* end = text.data() + index;
    const auto is_lost = [&](Place& place) {
      return place.depth == max_match || !trie.step(place, *end, end);
    };
    places_.erase(std::remove_if(places_.begin(), places_.end(), is_lost), places_.end());
    Place place{};
    if (trie.first(name_, *end, place)) places_.push_back(place);
  }
  const int32_t* end = text.data() + text.size();
  const auto is_dead_end = [&](Place& place) { return !trie.settle(place, end) || !trie.continues(place); };
  places_.erase(std::remove_if(places_.begin(), places_.end(), is_dead_end), places_.end());
}

}  // namespace ngram
