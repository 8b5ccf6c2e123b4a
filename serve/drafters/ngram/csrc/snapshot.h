// The trie in a file.
#pragma once

#include <stdexcept>
#include <string>

#include "trie.h"

namespace ngram {

// The system refused a file.
struct FileError : std::runtime_error {
  FileError(const std::string& path, int error) : std::runtime_error(path), number(error) {}
  int number;  // errno
};

// Little-endian: magic, version, the counts of Header; names; nodes, parents first and siblings last used first;
// leaves in the order in which they are given up; chunks of the log, oldest first; a checksum of all that. Ids are
// places in the file. What is read back is equal to what was written, but for unused namespaces.
class Snapshot {
 public:
  static std::string write(const Trie& trie);
  // Writes the file in place, so a failure leaves a part of it. Throws FileError.
  static void store(const std::string& bytes, const std::string& path);
  // Throws FileError, and std::invalid_argument naming the file if it is damaged or does not fit.
  static Trie read(const std::string& path, uint32_t capacity, uint32_t branch_length, int32_t vocab_size);

 private:
  class Reader;
};

}  // namespace ngram
