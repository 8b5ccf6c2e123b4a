// The trie of inserted texts: every token of a text begins a branch of at most `branch_length` tokens.
//
// Only the part of a branch that several texts share has nodes. The rest is the tail of a leaf, a position in the log
// of texts: most of a branch costs nothing, grows with its text, and may be read beyond the branch's end. A new node
// evicts the least recently used leaf.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "node_pool.h"
#include "text_log.h"

namespace ngram {

constexpr size_t MAX_NAME = 64;  // bytes of a namespace's name

// A string of `depth` tokens that occurs in the trie: the path to `node` and the first depth - node's depth tokens of
// its tail. It is valid until the node is evicted, which a changed birth shows.
struct Place {
  uint32_t node;
  uint32_t birth;
  uint32_t depth;
};

// The path to a leaf, and the part of its tail that belongs to the branch.
struct Branch {
  std::string name;
  std::vector<int32_t> tokens;
  std::vector<uint32_t> frequencies;  // of the path's nodes; the tail has none
};

struct Namespace {
  std::string name;
  uint32_t num_children = 0;  // branches that begin here
  uint32_t num_users = 0;     // requests
};

// A text being inserted. It reserves all that `append` needs, so that the inserting thread, on which nobody could catch
// a std::bad_alloc, allocates nothing.
struct Writer {
  explicit Writer(uint32_t branch_length) {
    tokens.reserve(2 * size_t{branch_length});
    positions.reserve(2 * size_t{branch_length});
    places.reserve(branch_length);
  }
  uint32_t name = 0;                // number of its namespace
  Position end;                     // where its next token goes
  std::vector<int32_t> tokens;      // at least its last branch_length tokens
  std::vector<Position> positions;  // of each of them
  std::vector<Place> places;        // the last strings of the text that others share, longest first
};

class Trie {
 public:
  Trie(uint32_t capacity, uint32_t branch_length);

  // Numbers of namespaces. A namespace without users and branches is dropped.
  uint32_t enter(const std::string& name);
  bool knows(const std::string& name) const { return numbers_.count(name) > 0; }
  void leave(uint32_t name) noexcept;

  // Begins a text; `append` then adds a token to the text and to all of its branches.
  void begin(Writer& writer, uint32_t name) const;
  void append(Writer& writer, int32_t token) noexcept;

  // Extends the string by `token`; `text` points after the present string. False if it does not occur.
  bool step(Place& place, int32_t token, const int32_t* text) const;
  // Moves the place down to the deepest node on its string. False if it no longer exists.
  bool settle(Place& place, const int32_t* text) const;
  // Where the text continues after a settled place in a leaf.
  Position continuation(const Place& place) const;
  // Whether anything follows a settled place.
  bool continues(const Place& place) const;

  Branch branch(uint32_t leaf) const;
  const NodePool& nodes() const { return nodes_; }
  const TextLog& log() const { return log_; }
  const std::vector<Namespace>& names() const { return names_; }
  uint32_t branch_length() const { return branch_length_; }
  uint64_t num_evicted() const { return num_evicted_; }
  uint64_t num_inserted() const { return num_inserted_; }
  size_t bytes() const;
  // Throws Contradiction where the structure contradicts itself. Walks everything.
  void check() const;

 private:
  friend class Snapshot;

  bool advance(Place& place, Writer& writer);
  bool advance_in_tail(Place& place, Writer& writer);
  void split(uint32_t leaf, uint32_t num_shared, const Writer& writer);
  uint32_t create(uint32_t parent, int32_t token, uint32_t frequency);
  void create_leaf(uint32_t parent, int32_t token, uint32_t frequency, Position tail);
  bool descend(Place& place, uint32_t child, Writer& writer);
  void evict();
  void forget_if_unused(uint32_t name);

  uint32_t branch_length_;
  NodePool nodes_;
  TextLog log_;
  std::vector<Namespace> names_;
  std::vector<uint32_t> free_names_;  // with room for all: giving up a name allocates nothing
  std::unordered_map<std::string, uint32_t> numbers_;
  uint64_t num_evicted_ = 0;
  uint64_t num_inserted_ = 0;  // tokens
};

}  // namespace ngram
