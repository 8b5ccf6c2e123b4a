// Options of the n-gram core and their limits.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "draft.h"
#include "node_pool.h"

namespace ngram {

// Throws std::invalid_argument with the name, its value and the range.
inline void within(const char* name, int64_t value, int64_t least, int64_t most, const char* why = "") {
  if (least <= value && value <= most) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be between " +
                              std::to_string(least) + " and " + std::to_string(most) + why);
}

inline void check_tokens(const int32_t* tokens, size_t num_tokens) {
  for (size_t index = 0; index < num_tokens; ++index) within("a token", tokens[index], 0, MAX_TOKEN);
}

struct Options {
  int64_t rows;           // requests at the same time
  int64_t capacity;       // nodes
  int64_t branch_length;  // tokens from a branch's first to its last
  int64_t min_match;      // shortest end of a text that is looked up
  int64_t max_match;      // longest
  int64_t breadth;        // children of a drafted node
  int64_t queue_tokens;   // tokens that may wait for insertion

  // Throws std::invalid_argument.
  void validate() const {
    within("rows", rows, 1, 65536);
    within("branch_length", branch_length, 2, MAX_BRANCH);
    within("capacity", capacity, branch_length + 1, (int64_t{1} << 31) - 2, " (the least is branch_length + 1)");
    within("max_match", max_match, 1, branch_length - 1, " (the most is branch_length - 1)");
    within("min_match", min_match, 1, max_match, " (the most is max_match)");
    within("breadth", breadth, 1, MAX_WIDTH);
    within("queue_tokens", queue_tokens, 2 * branch_length, int64_t{1} << 30, " (the least is 2 * branch_length)");
  }
};

}  // namespace ngram
