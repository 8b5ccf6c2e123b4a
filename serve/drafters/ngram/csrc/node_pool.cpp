#include "node_pool.h"

#include <cassert>
#include <string>

namespace ngram {

NodePool::NodePool(uint32_t capacity)
    : capacity_(capacity),
      nodes_(size_t{capacity} + 1),
      links_(size_t{capacity} + 1),
      table_(capacity) {}

uint32_t NodePool::find(uint32_t parent, int32_t token) const {
  if ((parent & ROOT) != 0 || nodes_[parent].hashed) {
    const auto is_wanted = [&](uint32_t id) { return nodes_[id].token == token && nodes_[id].parent == parent; };
    return table_.find(ChildTable::hash(parent, token), is_wanted);
  }
  if (nodes_[parent].is_leaf()) return NONE;
  uint32_t id = nodes_[parent].down;
  while (id != NONE && nodes_[id].token != token) id = nodes_[id].next;
  return id;
}

uint32_t NodePool::create(uint32_t parent, int32_t token, uint32_t frequency) {
  const uint32_t id = take();
  Node& node = nodes_[id];
  node = Node{};
  node.token = token;
  node.frequency = frequency;
  node.birth = next_birth();
  node.depth = ((parent & ROOT) != 0 ? 1 : nodes_[parent].depth + 1u) & MAX_BRANCH;
  links_[id] = {id, id};
  attach(id, parent);
  return id;
}

void NodePool::use(uint32_t id) {
  Node& node = nodes_[id];
  // A text inside a tail was counted for all of it; where the tail has become nodes it must not count twice.
  const uint32_t most = (node.parent & ROOT) != 0 ? UINT32_MAX : nodes_[node.parent].frequency;
  if (node.frequency < most) ++node.frequency;
  if (node.previous != NONE) {
    unlink_sibling(id, node.parent);
    push_front(id, node.parent);
  }
  if (node.is_leaf() && newest_ != id) {
    unlist(id);
    list_newest(id);
  }
}

uint32_t NodePool::remove(uint32_t leaf) {
  assert(nodes_[leaf].is_leaf());
  const uint32_t parent = nodes_[leaf].parent;
  unlist(leaf);
  if ((parent & ROOT) != 0 || nodes_[parent].hashed) {
    table_.remove(ChildTable::hash(parent, nodes_[leaf].token), leaf);
  }
  if ((parent & ROOT) == 0) {
    unlink_sibling(leaf, parent);
    Node& above = nodes_[parent];
    if (--above.num_children == 0) {
      above.hashed = 0;
      above.set_tail({});
      renew(parent);  // its tail is lost, so places in it become invalid
      list_oldest(parent);
    }
  }
  nodes_[leaf].birth = 0;
  nodes_[leaf].next = free_;
  free_ = leaf;
  --size_;
  return parent;
}

uint32_t NodePool::take() {
  assert(!is_full());
  ++size_;
  if (free_ == NONE) return untouched_++;
  const uint32_t id = free_;
  free_ = nodes_[id].next;
  return id;
}

void NodePool::attach(uint32_t id, uint32_t parent) {
  nodes_[id].parent = parent;
  if ((parent & ROOT) != 0) return add_to_table(id);
  Node& above = nodes_[parent];
  if (above.is_leaf()) {
    unlist(parent);
    above.set_tail({});
  }
  push_front(id, parent);
  ++above.num_children;
  if (above.hashed) return add_to_table(id);
  if (above.num_children > MAX_WALKED) {
    above.hashed = 1;
    for (uint32_t child = above.down; child != NONE; child = nodes_[child].next) add_to_table(child);
  }
}

void NodePool::push_front(uint32_t id, uint32_t parent) {
  const uint32_t first = nodes_[parent].down;
  nodes_[id].next = first;
  nodes_[id].previous = NONE;
  if (first != NONE) nodes_[first].previous = id;
  nodes_[parent].down = id;
}

void NodePool::unlink_sibling(uint32_t id, uint32_t parent) {
  const uint32_t previous = nodes_[id].previous, next = nodes_[id].next;
  if (previous != NONE) {
    nodes_[previous].next = next;
  } else {
    nodes_[parent].down = next;
  }
  if (next != NONE) nodes_[next].previous = previous;
}

void NodePool::add_to_table(uint32_t id) { table_.add(ChildTable::hash(nodes_[id].parent, nodes_[id].token), id); }

void NodePool::list_newest(uint32_t leaf) {
  links_[leaf].older = newest_;
  links_[leaf].newer = NONE;
  (newest_ != NONE ? links_[newest_].newer : oldest_) = leaf;
  newest_ = leaf;
}

void NodePool::list_oldest(uint32_t leaf) {
  links_[leaf].older = NONE;
  links_[leaf].newer = oldest_;
  (oldest_ != NONE ? links_[oldest_].older : newest_) = leaf;
  oldest_ = leaf;
}

void NodePool::unlist(uint32_t leaf) {
  if (!is_listed(leaf)) return;
  const Links links = links_[leaf];
  (links.older != NONE ? links_[links.older].newer : oldest_) = links.newer;
  (links.newer != NONE ? links_[links.newer].older : newest_) = links.older;
  links_[leaf].older = links_[leaf].newer = leaf;
}

namespace {

void require(bool holds, const char* what, uint32_t id) {
  if (!holds) throw Contradiction("n-gram trie: node " + std::to_string(id) + ": " + what);
}

}  // namespace

void NodePool::check() const {
  uint32_t num_nodes = 0, num_leaves = 0, num_free = 0;
  for (uint32_t id = 1; id < untouched_; ++id) {
    if (nodes_[id].birth == 0) continue;
    check_node(id);
    ++num_nodes;
    num_leaves += nodes_[id].is_leaf();
  }
  for (uint32_t id = free_; id != NONE; id = nodes_[id].next) {
    require(nodes_[id].birth == 0, "free and in use", id);
    require(++num_free < untouched_, "the free list is a circle", id);
  }
  require(num_nodes == size_, "nodes are counted wrong", size_);
  require(num_nodes + num_free == untouched_ - 1, "nodes were lost", num_free);
  require(num_leaves == check_leaves(), "a leaf is in no list", num_leaves);
}

void NodePool::check_node(uint32_t id) const {
  const Node& node = nodes_[id];
  const bool is_first_level = (node.parent & ROOT) != 0;
  require(find(node.parent, node.token) == id, "not found below its parent", id);
  require(node.depth == (is_first_level ? 1 : nodes_[node.parent].depth + 1), "wrong depth", id);
  require(is_first_level || nodes_[node.parent].birth != 0, "its parent is free", id);
  require(is_first_level || node.frequency <= nodes_[node.parent].frequency, "used more often than its parent", id);
  require(node.is_leaf() == is_listed(id), "leaves, and no others, are listed", id);
  require(node.is_leaf() || node.offset == 0, "a tail above children", id);
  if (node.is_leaf()) return;
  uint32_t count = 0, previous = NONE;
  for (uint32_t child = node.down; child != NONE; child = nodes_[child].next) {
    require(nodes_[child].birth != 0 && nodes_[child].parent == id, "a child of another node", child);
    require(nodes_[child].previous == previous, "siblings disagree", child);
    require(++count <= node.num_children, "more children than counted", id);
    previous = child;
  }
  require(count == node.num_children, "fewer children than counted", id);
}

uint32_t NodePool::check_leaves() const {
  uint32_t count = 0, older = NONE;
  for (uint32_t leaf = oldest_; leaf != NONE; leaf = links_[leaf].newer) {
    require(nodes_[leaf].birth != 0 && nodes_[leaf].is_leaf(), "listed, but no leaf", leaf);
    require(links_[leaf].older == older, "neighbours in the list disagree", leaf);
    require(++count <= size_, "the list of leaves is a circle", leaf);
    older = leaf;
  }
  require(older == newest_, "the newest leaf is another", older);
  return count;
}

}  // namespace ngram
