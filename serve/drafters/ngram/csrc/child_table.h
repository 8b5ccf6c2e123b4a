// The children of nodes with many children: a hash table of node ids in cache lines.
#pragma once

#include <cassert>
#include <cstdint>

#include "memory.h"

namespace ngram {

// A line has slots for 15 ids, each with as many bits of its key's hash as fit beside it, so that nearly every lookup
// reads one line and only the wanted node. An id whose line is full goes to the next one, and every line on its way
// counts it: a lookup ends at the first line that no id has passed, without tombstones. The table does not store keys;
// the caller passes hashes and compares.
class ChildTable {
 public:
  explicit ChildTable(uint32_t max_ids)
      : id_bits_(bits(max_ids)),
        tag_mask_((1u << (32 - id_bits_)) - 1),
        line_mask_(lines(max_ids) - 1),
        lines_(size_t{line_mask_} + 1) {}

  static uint64_t hash(uint32_t parent, int32_t token) {
    uint64_t key = (uint64_t{parent} << 32 | static_cast<uint32_t>(token)) ^ HASH_SECRET;
    key = (key ^ key >> 29) * 0x9E3779B97F4A7C15u;
    return (key ^ key >> 32) * 0xD6E8FEB86659FD93u;
  }

  // The id for which `is_wanted(id)`; 0 if there is none. May ask for id 0, too.
  template <class Wanted>
  uint32_t find(uint64_t hash, const Wanted& is_wanted) const {
    const uint32_t tag = tag_of(hash);
    uint32_t at = home(hash);
    for (uint32_t left = line_mask_;; --left, at = next(at)) {
      const Line& line = lines_[at];
      for (const uint32_t slot : line.slots) {
        if (slot >> id_bits_ == tag && is_wanted(slot & id_mask())) return slot & id_mask();
      }
      if (line.num_passed == 0 || left == 0) return 0;
    }
  }

  void add(uint64_t hash, uint32_t id) {
    uint32_t at = home(hash);
    uint32_t* slot;
    while ((slot = slot_with(at, 0)) == nullptr) {
      ++lines_[at].num_passed;
      at = next(at);
    }
    *slot = tag_of(hash) << id_bits_ | id;
  }

  void remove(uint64_t hash, uint32_t id) {
    uint32_t at = home(hash);
    uint32_t* slot;
    while ((slot = slot_with(at, tag_of(hash) << id_bits_ | id)) == nullptr) {
      assert(lines_[at].num_passed > 0);
      --lines_[at].num_passed;
      at = next(at);
    }
    *slot = 0;
  }

  void prefetch_line(uint64_t hash) const { prefetch(&lines_[home(hash)]); }
  // An id in the home line with the same tag; 0 if there is none.
  uint32_t guess(uint64_t hash) const {
    for (const uint32_t slot : lines_[home(hash)].slots) {
      if (slot >> id_bits_ == tag_of(hash) && slot != 0) return slot & id_mask();
    }
    return 0;
  }
  size_t bytes() const { return lines_.bytes(); }

 private:
  struct Line {
    uint32_t slots[15];
    uint32_t num_passed;  // ids that found this line full
  };
  static_assert(sizeof(Line) == 64);

  static uint32_t bits(uint32_t value) {
    uint32_t count = 1;
    while (value >> count != 0) ++count;
    return count;
  }
  static uint32_t lines(uint32_t max_ids) {  // at most 12 of 15 slots are used
    return max_ids < 12 ? 1 : 2 * power_of_two_within(max_ids / 12);
  }
  uint32_t id_mask() const { return (uint32_t{1} << id_bits_) - 1; }
  uint32_t tag_of(uint64_t hash) const { return static_cast<uint32_t>(hash >> 32) & tag_mask_; }
  uint32_t home(uint64_t hash) const { return static_cast<uint32_t>(hash) & line_mask_; }
  uint32_t next(uint32_t line) const { return (line + 1) & line_mask_; }
  uint32_t* slot_with(uint32_t line, uint32_t value) {
    for (uint32_t& slot : lines_[line].slots) {
      if (slot == value) return &slot;
    }
    return nullptr;
  }

  uint32_t id_bits_, tag_mask_, line_mask_;
  Array<Line> lines_;
};

}  // namespace ngram
