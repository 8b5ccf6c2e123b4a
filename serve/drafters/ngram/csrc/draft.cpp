#include "draft.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ngram {

namespace {

constexpr uint32_t MAX_OCCURRENCES = 4;  // starts in the own text
constexpr uint32_t MAX_PLACES = 4;       // starts in a namespace of the trie
constexpr uint32_t VISITS_PER_NODE = 4;  // several starts may draft the same nodes
constexpr uint32_t MAX_VISITS = VISITS_PER_NODE * MAX_WIDTH;

}  // namespace

Draft::Draft(const Trie& trie, uint32_t min_match, uint32_t breadth)
    : trie_(trie),
      min_match_(min_match),
      breadth_(breadth),
      candidates_(size_t{breadth} * (MAX_OCCURRENCES + MAX_HISTORIES * MAX_PLACES + MAX_VISITS)),
      waiting_(MAX_VISITS) {}

uint32_t Draft::propose(const Context& context, const std::vector<History>& histories, const Row& row) {
  text_ = context.text().data();
  text_size_ = static_cast<uint32_t>(context.text().size());
  std::fill_n(row.tokens, row.width, -1);
  std::fill_n(row.parents, row.width, -1);
  std::fill_n(row.scores, row.width, -std::numeric_limits<float>::infinity());
  std::fill_n(row.foreign, row.width, true);
  row.scores[0] = 0;
  row.foreign[0] = false;
  row.tokens[0] = text_[text_size_ - 1];
  size_ = 1;
  num_children_[0] = 0;
  num_candidates_ = num_waiting_ = 0;
  const uint32_t longest = row.width > 1 ? find_starts(context, histories) : 0;
  for (uint32_t visits = VISITS_PER_NODE * row.width; visits > 0 && size_ < row.width && num_waiting_ > 0; --visits) {
    const Ranked ranked = waiting_[--num_waiting_];
    const Candidate& candidate = candidates_[ranked.candidate];
    uint32_t node = 0;
    if (place(candidate, row, node)) follow(candidate.rest, node, candidate.length, candidate.probability);
  }
  return longest;
}

// Ranks what follows the longest matches.
uint32_t Draft::find_starts(const Context& context, const std::vector<History>& histories) {
  starts_.clear();
  context.search(MAX_OCCURRENCES, found_);
  for (const Occurrence& found : found_) {
    starts_.push_back({{Cursor::TEXT, 1, found.next, text_size_ - found.next}, found.length});
  }
  for (const History& history : histories) find_places(history);
  uint32_t longest = 0;
  for (const Start& start : starts_) longest = std::max(longest, start.length);
  for (const Start& start : starts_) {
    follow(start.cursor, 0, start.length, static_cast<double>(start.length) / longest);
  }
  return longest;
}

// A shorter match in the trie counts only if more texts have it.
void Draft::find_places(const History& history) {
  uint32_t frequency = 0;
  const size_t room = starts_.size() + MAX_PLACES;
  for (const Place& place : history.places()) {
    if (place.depth < min_match_ || starts_.size() == room) break;
    const Node& node = trie_.nodes()[place.node];
    if (node.frequency <= frequency) continue;
    frequency = node.frequency;
    Cursor cursor{Cursor::NODE, frequency, place.node, 0};
    if (node.is_leaf()) {
      const Position position = trie_.continuation(place);
      cursor = {Cursor::LOG, frequency, position.chunk, position.offset};
    }
    starts_.push_back({cursor, place.depth});
  }
}

// Ranks the tokens at `cursor` as children of `parent`. The fewer tokens match and the more different ones followed
// them, the more of the probability is kept for an unseen token.
void Draft::follow(const Cursor& cursor, uint32_t parent, uint32_t length, double probability) {
  if (cursor.kind == Cursor::NODE) return follow_node(cursor, parent, length, probability);
  Cursor rest = cursor;
  int32_t token;
  if (cursor.kind == Cursor::LOG) {
    const Position position{cursor.place, cursor.more};
    token = trie_.log().read(position);
    if (token == NO_TOKEN) return;
    const Position next = trie_.log().skip(position, 1);
    rest.place = next.chunk;
    rest.more = next.offset;
  } else {
    while (rest.place >= text_size_) rest.place -= rest.more;
    token = text_[rest.place++];
  }
  const double weight = static_cast<double>(cursor.frequency) * length;
  push(token, parent, length, probability * (weight / (weight + 1)), rest);
}

void Draft::follow_node(const Cursor& cursor, uint32_t parent, uint32_t length, double probability) {
  const NodePool& nodes = trie_.nodes();
  const Node& above = nodes[cursor.place];
  const double weight = probability * length / (static_cast<double>(above.frequency) * length + above.num_children);
  uint32_t left = breadth_;
  for (uint32_t id = above.down; id != NONE && left > 0; id = nodes[id].next, --left) {
    const Node& node = nodes[id];
    // Read when this child is expanded.
    prefetch(node.is_leaf() ? static_cast<const void*>(&trie_.log().at(node.down)) : &nodes[node.down]);
    const Cursor below{Cursor::NODE, node.frequency, id, 0}, tail{Cursor::LOG, node.frequency, node.down, node.offset};
    push(node.token, parent, length, weight * node.frequency, node.is_leaf() ? tail : below);
  }
}

void Draft::push(int32_t token, uint32_t parent, uint32_t length, double probability, const Cursor& rest) {
  const uint32_t place = rank(probability);
  if (place == MAX_VISITS) return;
  waiting_[place] = {probability, num_candidates_};
  Candidate& candidate = candidates_[num_candidates_++];
  candidate.token = token;
  candidate.parent = parent;
  candidate.length = length + 1;
  candidate.probability = probability;
  candidate.rest = rest;
}

// Makes room among the waiting candidates, after equal ones, and returns the place; MAX_VISITS if that many are better,
// since no more are visited.
uint32_t Draft::rank(double score) {
  uint32_t place;
  if (num_waiting_ < MAX_VISITS) {
    for (place = num_waiting_++; place > 0 && waiting_[place - 1].score >= score; --place) {
      waiting_[place] = waiting_[place - 1];
    }
    return place;
  }
  if (score <= waiting_[0].score) return MAX_VISITS;
  for (place = 0; place + 1 < MAX_VISITS && waiting_[place + 1].score < score; ++place) {
    waiting_[place] = waiting_[place + 1];
  }
  return place;
}

// Adds the candidate as a node, or finds an equal node. False if its parent has no room for a child. A node that the
// request's own text proposes, too, is not foreign: nor are those above it then, since a text is followed from the root.
bool Draft::place(const Candidate& candidate, const Row& row, uint32_t& node) {
  const bool is_foreign = candidate.rest.kind != Cursor::TEXT;
  node = child(row, candidate.parent, candidate.token);
  if (node != 0) {
    row.foreign[node] = row.foreign[node] && is_foreign;
    return true;
  }
  if (num_children_[candidate.parent] >= breadth_) return false;
  node = size_++;
  ++num_children_[candidate.parent];
  row.tokens[node] = candidate.token;
  row.parents[node] = static_cast<int32_t>(candidate.parent);
  row.scores[node] = std::log(static_cast<float>(candidate.probability));
  row.foreign[node] = is_foreign;
  num_children_[node] = 0;
  return true;
}

// The node for `token` below `parent`; 0 if there is none.
uint32_t Draft::child(const Row& row, uint32_t parent, int32_t token) const {
  if (num_children_[parent] == 0) return 0;
  for (uint32_t node = parent + 1; node < size_; ++node) {
    if (row.tokens[node] == token && row.parents[node] == static_cast<int32_t>(parent)) return node;
  }
  return 0;
}

}  // namespace ngram
