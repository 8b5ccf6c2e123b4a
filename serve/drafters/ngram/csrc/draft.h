// Grows a tree of drafted tokens after a request's last token, from its own text and from the trie.
#pragma once

#include <cstdint>
#include <vector>

#include "context.h"
#include "history.h"
#include "trie.h"

namespace ngram {

constexpr uint32_t MAX_WIDTH = 64;  // nodes of a tree: the engine keeps ancestors in 64 bits

// One request's row of the caller's arrays, `width` entries each. Unused nodes are -1.
struct Row {
  uint32_t width;
  int32_t* tokens;
  int32_t* parents;
  float* scores;  // log-probability that the node is reached; -inf of unused ones
  bool* foreign;  // whether the node is drawn from other requests' texts alone; true of unused ones
};

class Draft {
 public:
  Draft(const Trie& trie, uint32_t min_match, uint32_t breadth);

  // Fills `row`, from the text and at most MAX_HISTORIES of it; returns the length of the longest match, 0 if nothing is drafted.
  uint32_t propose(const Context& context, const std::vector<History>& histories, const Row& row);
  // Nodes of the last drafted tree, root included.
  uint32_t size() const { return size_; }

 private:
  // What comes next: the children of a node, or one token of a text.
  struct Cursor {
    enum Kind : uint32_t { NODE, LOG, TEXT } kind;
    uint32_t frequency;
    uint32_t place;  // NODE: its id; LOG: chunk; TEXT: index in the own text
    uint32_t more;   // LOG: offset; TEXT: after the end, so many last tokens repeat
  };
  struct Start {
    Cursor cursor;
    uint32_t length;
  };
  struct Candidate {
    int32_t token;
    uint32_t parent;  // node of the tree
    uint32_t length;  // tokens that match, drafted ones included
    double probability;
    Cursor rest;
  };
  struct Ranked {
    double score;
    uint32_t candidate;
  };

  uint32_t find_starts(const Context& context, const std::vector<History>& histories);
  void find_places(const History& history);
  void follow(const Cursor& cursor, uint32_t parent, uint32_t length, double probability);
  void follow_node(const Cursor& cursor, uint32_t parent, uint32_t length, double probability);
  void push(int32_t token, uint32_t parent, uint32_t length, double probability, const Cursor& rest);
  uint32_t rank(double score);
  bool place(const Candidate& candidate, const Row& row, uint32_t& node);
  uint32_t child(const Row& row, uint32_t parent, int32_t token) const;

  const Trie& trie_;
  uint32_t min_match_;
  uint32_t breadth_;

  // Of the tree under construction.
  const int32_t* text_ = nullptr;
  uint32_t text_size_ = 0;
  std::vector<Start> starts_;
  std::vector<Occurrence> found_;
  std::vector<Candidate> candidates_;  // the first num_candidates_ are in use
  std::vector<Ranked> waiting_;        // the first num_waiting_ are in use, best last; among equals the first last
  uint32_t num_candidates_ = 0;
  uint32_t num_waiting_ = 0;
  uint32_t size_ = 0;
  uint32_t num_children_[MAX_WIDTH];
};

}  // namespace ngram
