#include "warm_up.h"

#include <algorithm>

namespace ngram {

void WarmUp::clear() {
  pairs_.clear();
  reached_.clear();
  firsts_.clear();
  siblings_.clear();
  chunks_.clear();
}

size_t WarmUp::add(const History& history, const std::vector<int32_t>& text) {
  const size_t start = history.next(text, max_match_);
  for (size_t index = start; index < text.size(); ++index) {
    pairs_.push_back({ROOT | history.name(), text[index], index + 1 < text.size() ? text[index + 1] : NO_TOKEN});
  }
  if (start < text.size()) {
    for (const Place& place : history.places()) reached_.push_back({place.node, text[start]});
  }
  return text.size() - start;
}

const std::vector<uint32_t>& WarmUp::steps() {
  const NodePool& nodes = trie_.nodes();
  for (const Pair& pair : pairs_) nodes.prefetch_line(pair.root, pair.token);
  for (const Reached& place : reached_) prefetch(&nodes[place.node]);
  for (const Pair& pair : pairs_) nodes.prefetch_child(pair.root, pair.token);
  for (const Reached& place : reached_) prefetch_below(place.node, place.next);
  for (const Pair& pair : pairs_) {
    const uint32_t id = nodes.find(pair.root, pair.token);
    firsts_.push_back(id);
    if (id != NONE) prefetch_below(id, pair.next);
  }
  for (const Reached& place : reached_) prefetch_hashed(place.node, place.next);
  for (size_t index = 0; index < pairs_.size(); ++index) {
    if (firsts_[index] != NONE) prefetch_hashed(firsts_[index], pairs_[index].next);
  }
  return firsts_;
}

void WarmUp::prefetch_below(uint32_t id, int32_t next) const {
  const Node& node = trie_.nodes()[id];
  if (node.is_leaf()) {
    prefetch(&trie_.log().at(node.down));
  } else if (node.hashed && next != NO_TOKEN) {
    trie_.nodes().prefetch_line(id, next);
  } else {
    prefetch(&trie_.nodes()[node.down]);
  }
}

void WarmUp::prefetch_hashed(uint32_t id, int32_t next) const {
  if (trie_.nodes()[id].hashed && next != NO_TOKEN) trie_.nodes().prefetch_child(id, next);
}

void WarmUp::add_match(const History& history) {
  uint32_t frequency = 0;
  for (const Place& place : history.places()) {  // as Draft begins
    const Node& node = trie_.nodes()[place.node];
    if (node.frequency > frequency && !node.is_leaf()) siblings_.push_back(node.down);
    frequency = std::max(frequency, node.frequency);
  }
}

void WarmUp::drafts() {
  for (uint32_t sibling = 0; sibling < breadth_; ++sibling) {
    for (uint32_t& id : siblings_) {
      if (id == NONE) continue;
      const Node& node = trie_.nodes()[id];
      if (node.is_leaf()) {
        prefetch(&trie_.log().at(node.down));
        chunks_.push_back(node.down);
      } else {
        prefetch(&trie_.nodes()[node.down]);
      }
      id = node.next;
      prefetch(&trie_.nodes()[id]);
    }
  }
  for (const uint32_t chunk : chunks_) prefetch(&trie_.log().at(trie_.log().at(chunk).next));
}

}  // namespace ngram
