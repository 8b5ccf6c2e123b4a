#include "trie.h"

#include <algorithm>
#include <cassert>

namespace ngram {

namespace {

// Nodes per chunk of the log: texts have between one and two tokens per node.
constexpr uint32_t NODES_PER_CHUNK = 6;
constexpr uint32_t MIN_CHUNKS = 16;

}  // namespace

Trie::Trie(uint32_t capacity, uint32_t branch_length)
    : branch_length_(branch_length),
      nodes_(capacity),
      log_(std::max(MIN_CHUNKS, power_of_two_within(std::max(1u, capacity / NODES_PER_CHUNK)))) {}

uint32_t Trie::enter(const std::string& name) {
  const auto known = numbers_.find(name);
  if (known != numbers_.end()) {
    ++names_[known->second].num_users;
    return known->second;
  }
  if (free_names_.empty()) {
    names_.emplace_back();
    free_names_.reserve(names_.capacity());
    free_names_.push_back(static_cast<uint32_t>(names_.size() - 1));
  }
  const uint32_t number = free_names_.back();
  Namespace space{name, 0, 1};
  numbers_.emplace(name, number);
  names_[number] = std::move(space);  // nothing changes before all memory is there
  free_names_.pop_back();
  return number;
}

void Trie::leave(uint32_t name) noexcept {
  --names_[name].num_users;
  forget_if_unused(name);
}

void Trie::forget_if_unused(uint32_t name) {
  if (names_[name].num_users > 0 || names_[name].num_children > 0) return;
  numbers_.erase(names_[name].name);
  names_[name] = {};
  free_names_.push_back(name);
}

void Trie::begin(Writer& writer, uint32_t name) const {
  writer.name = name;
  writer.end = {};
  writer.tokens.clear();
  writer.positions.clear();
  writer.places.clear();
}

void Trie::append(Writer& writer, int32_t token) noexcept {
  if (writer.tokens.size() == 2 * size_t{branch_length_}) {
    writer.tokens.erase(writer.tokens.begin(), writer.tokens.begin() + branch_length_);
    writer.positions.erase(writer.positions.begin(), writer.positions.begin() + branch_length_);
  }
  writer.tokens.push_back(token);
  writer.positions.push_back(log_.append(writer.end, token));
  ++num_inserted_;
  size_t kept = 0;
  for (Place& place : writer.places) {
    if (advance(place, writer)) writer.places[kept++] = place;
  }
  writer.places.resize(kept);
  const uint32_t root = ROOT | writer.name;
  const uint32_t child = nodes_.find(root, token);
  Place place{};
  if (child == NONE) {
    create_leaf(root, token, 1, writer.end);
    ++names_[writer.name].num_children;
  } else if (descend(place, child, writer)) {
    writer.places.push_back(place);
  }
}

// Extends the string at `place` by the last written token. False when nothing is left to do for this branch: it is
// complete, or its rest is the tail of a leaf that points into this text.
bool Trie::advance(Place& place, Writer& writer) {
  assert(place.depth < writer.tokens.size());
  if (!settle(place, &writer.tokens.back())) return false;
  const int32_t token = writer.tokens.back();
  if (nodes_[place.node].is_leaf()) return advance_in_tail(place, writer);
  const uint32_t child = nodes_.find(place.node, token);
  if (child != NONE) return descend(place, child, writer);
  create_leaf(place.node, token, 1, writer.end);
  return false;
}

bool Trie::advance_in_tail(Place& place, Writer& writer) {
  Node& leaf = nodes_[place.node];
  const uint32_t num_shared = place.depth - leaf.depth;
  const int32_t expected = log_.read(continuation(place));
  const int32_t token = writer.tokens.back();
  if (expected != NO_TOKEN && expected != token) {
    split(place.node, num_shared, writer);
    return false;
  }
  if (expected == token && ++place.depth < branch_length_) return true;
  // The branch is complete, or the old text has ended or is overwritten: the tail moves to this text, which lives
  // longest. Places further along an overwritten text may name another string now, so they are invalidated.
  if (!log_.alive(leaf.tail().chunk)) nodes_.renew(place.node);
  leaf.set_tail(*(&writer.positions.back() - num_shared));
  return false;
}

// The text differs from the tail after `num_shared` tokens. These become nodes; both continuations become leaves below.
void Trie::split(uint32_t leaf, uint32_t num_shared, const Writer& writer) {
  const uint32_t frequency = nodes_[leaf].frequency;
  Position position = nodes_[leaf].tail();
  uint32_t node = leaf;
  nodes_.unlist(leaf);  // or it could be evicted to make room for its own children
  for (uint32_t shared = 0; shared < num_shared; ++shared) {
    node = create(node, log_.read(position), frequency);
    position = log_.skip(position, 1);
  }
  create_leaf(node, log_.read(position), std::max(1u, frequency - 1), log_.skip(position, 1));
  create_leaf(node, writer.tokens.back(), 1, writer.end);
}

uint32_t Trie::create(uint32_t parent, int32_t token, uint32_t frequency) {
  if ((parent & ROOT) == 0 && nodes_[parent].is_leaf()) nodes_.unlist(parent);
  if (nodes_.is_full()) evict();
  return nodes_.create(parent, token, frequency);
}

void Trie::create_leaf(uint32_t parent, int32_t token, uint32_t frequency, Position tail) {
  const uint32_t leaf = create(parent, token, frequency);
  nodes_[leaf].set_tail(tail);
  nodes_.list_newest(leaf);
}

// Follows the text to the existing node `child`. False when the branch is complete there.
bool Trie::descend(Place& place, uint32_t child, Writer& writer) {
  nodes_.use(child);
  Node& node = nodes_[child];
  place = {child, node.birth, node.depth};
  if (node.depth < branch_length_) return true;
  node.set_tail(writer.end);
  return false;
}

void Trie::evict() {
  // There is a leaf: a full pool holds more than the one branch that is being extended (capacity > branch_length).
  assert(nodes_.oldest() != NONE);
  ++num_evicted_;
  const uint32_t parent = nodes_.remove(nodes_.oldest());
  if ((parent & ROOT) == 0) return;
  --names_[parent & ~ROOT].num_children;
  forget_if_unused(parent & ~ROOT);
}

bool Trie::settle(Place& place, const int32_t* text) const {
  if (nodes_[place.node].birth != place.birth) return false;
  while (!nodes_[place.node].is_leaf() && place.depth > nodes_[place.node].depth) {
    const uint32_t child = nodes_.find(place.node, *(text - (place.depth - nodes_[place.node].depth)));
    if (child == NONE) return false;
    place.node = child;
    place.birth = nodes_[child].birth;
  }
  return true;
}

bool Trie::step(Place& place, int32_t token, const int32_t* text) const {
  if (!settle(place, text)) return false;
  if (nodes_[place.node].is_leaf()) {
    const int32_t expected = log_.read(continuation(place));
    ++place.depth;
    return expected == token;
  }
  const uint32_t child = nodes_.find(place.node, token);
  if (child == NONE) return false;
  place = {child, nodes_[child].birth, place.depth + 1};
  return true;
}

Position Trie::continuation(const Place& place) const {
  const Node& leaf = nodes_[place.node];
  return log_.skip(leaf.tail(), place.depth - leaf.depth);
}

bool Trie::continues(const Place& place) const {
  return !nodes_[place.node].is_leaf() || log_.read(continuation(place)) != NO_TOKEN;
}

Branch Trie::branch(uint32_t leaf) const {
  Branch branch;
  uint32_t id = leaf;
  for (; (id & ROOT) == 0; id = nodes_[id].parent) {
    branch.tokens.push_back(nodes_[id].token);
    branch.frequencies.push_back(nodes_[id].frequency);
  }
  branch.name = names_[id & ~ROOT].name;
  std::reverse(branch.tokens.begin(), branch.tokens.end());
  std::reverse(branch.frequencies.begin(), branch.frequencies.end());
  Position position = nodes_[leaf].tail();
  while (branch.tokens.size() < branch_length_) {
    const int32_t token = log_.read(position);
    if (token == NO_TOKEN) break;
    branch.tokens.push_back(token);
    position = log_.skip(position, 1);
  }
  return branch;
}

size_t Trie::bytes() const {
  size_t total = nodes_.bytes() + log_.bytes();
  for (const Namespace& space : names_) total += 2 * (sizeof(Namespace) + space.name.capacity());
  return total;
}

void Trie::check() const {
  nodes_.check();
  std::vector<uint32_t> num_children(names_.size());
  for (uint32_t id = 1; id <= nodes_.capacity(); ++id) {
    if (nodes_[id].birth == 0) continue;
    if (nodes_[id].depth > branch_length_) throw Contradiction("n-gram trie: a branch is too long");
    if ((nodes_[id].parent & ROOT) != 0) ++num_children.at(nodes_[id].parent & ~ROOT);
  }
  for (size_t number = 0; number < names_.size(); ++number) {
    const Namespace& space = names_[number];
    const auto known = numbers_.find(space.name);
    const bool is_known = known != numbers_.end() && known->second == number;
    const bool is_used = space.num_users > 0 || num_children[number] > 0;
    if (space.num_children != num_children[number] || is_used != is_known) {
      throw Contradiction("n-gram trie: namespace " + std::to_string(number) + " is counted wrong");
    }
  }
}

}  // namespace ngram
