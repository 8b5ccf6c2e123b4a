// Nodes of the trie in arrays with 32-bit links: children, siblings, and the eviction order of leaves.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "child_table.h"
#include "memory.h"
#include "text_log.h"

namespace ngram {

constexpr uint32_t NONE = 0;           // no node: ids begin at 1
constexpr uint32_t ROOT = 1u << 31;    // ROOT | number of a namespace is the parent of its first level
constexpr int32_t MAX_TOKEN = (1 << 21) - 1;
constexpr uint32_t MAX_BRANCH = 63;    // depth has 6 bits

// A fault of this program.
struct Contradiction : std::logic_error {
  using std::logic_error::logic_error;
};

// What a match reads: half a cache line.
struct Node {
  int32_t token;
  uint32_t parent;
  uint32_t down;       // first child; in a leaf the chunk of its tail
  uint32_t next;       // sibling used before this one; of a free node the next free one
  uint32_t previous;   // sibling used after this one
  uint32_t frequency;  // times that texts passed
  uint32_t birth;      // differs for every node that ever was; 0: free
  uint32_t num_children : 21;
  uint32_t depth : 6;
  uint32_t offset : 4;  // in a leaf: of its tail in its chunk
  uint32_t hashed : 1;  // its children are in the table

  bool is_leaf() const { return num_children == 0; }
  Position tail() const { return {down, offset}; }
  void set_tail(Position tail) {
    down = tail.chunk;
    offset = tail.offset & 15;
  }
};
static_assert(sizeof(Node) == 32);

// The list of leaves in the order of their last use; a node outside of it points to itself.
struct Links {
  uint32_t older, newer;
};

// Nodes of all namespaces. Invariant: a node without children is a leaf, and every leaf is in the list of leaves,
// except the one that is being extended. Siblings have distinct tokens and are listed last used first; the first level
// of a namespace has no such list and is reached by the table alone.
class NodePool {
 public:
  explicit NodePool(uint32_t capacity);

  uint32_t capacity() const { return capacity_; }
  uint32_t size() const { return size_; }
  size_t bytes() const { return nodes_.bytes() + links_.bytes() + table_.bytes(); }
  bool is_full() const { return size_ == capacity_; }
  Node& operator[](uint32_t id) { return nodes_[id]; }
  const Node& operator[](uint32_t id) const { return nodes_[id]; }

  // The child of `parent` for `token`, or NONE.
  uint32_t find(uint32_t parent, int32_t token) const;
  // A new child that is in no list of leaves; there must be room. `parent` stops being a leaf: its tail is lost.
  uint32_t create(uint32_t parent, int32_t token, uint32_t frequency);
  // Counts a use of `id` and moves it before its siblings; a leaf becomes the newest one.
  void use(uint32_t id);
  // Frees a leaf and returns its parent, which becomes the oldest leaf if it has no other children.
  uint32_t remove(uint32_t leaf);

  void list_newest(uint32_t leaf);
  void list_oldest(uint32_t leaf);
  void unlist(uint32_t leaf);
  bool is_listed(uint32_t id) const { return links_[id].older != id; }
  uint32_t oldest() const { return oldest_; }
  uint32_t newer(uint32_t leaf) const { return links_[leaf].newer; }
  // Invalidates every place that holds `id`.
  void renew(uint32_t id) { nodes_[id].birth = next_birth(); }

  // Prefetch what `find` reads below a root or a node with hashed children: first the line, then the child.
  void prefetch_line(uint32_t parent, int32_t token) const { table_.prefetch_line(ChildTable::hash(parent, token)); }
  void prefetch_child(uint32_t parent, int32_t token) const {
    prefetch(&nodes_[table_.guess(ChildTable::hash(parent, token))]);
  }
  // Throws Contradiction if the links are inconsistent. Walks all nodes.
  void check() const;

 private:
  // Up to this many children are found by walking the siblings.
  static constexpr uint32_t MAX_WALKED = 3;

  uint32_t next_birth() {
    if (++births_ == 0) ++births_;  // 0 means free
    return births_;
  }
  uint32_t take();
  void attach(uint32_t id, uint32_t parent);
  void push_front(uint32_t id, uint32_t parent);
  void unlink_sibling(uint32_t id, uint32_t parent);
  void add_to_table(uint32_t id);
  void check_node(uint32_t id) const;
  uint32_t check_leaves() const;

  uint32_t capacity_;
  uint32_t size_ = 0;
  uint32_t untouched_ = 1;  // nodes from here on were never used
  uint32_t free_ = NONE;
  uint32_t oldest_ = NONE, newest_ = NONE;
  uint32_t births_ = 0;
  Array<Node> nodes_;
  Array<Links> links_;
  ChildTable table_;
};

}  // namespace ngram
