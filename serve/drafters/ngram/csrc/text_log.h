// The inserted texts themselves, in a ring of chunks: the newest overwrites the oldest. Leaves of the trie point here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory.h"

namespace ngram {

constexpr int32_t NO_TOKEN = -1;
constexpr uint32_t CHUNK_TOKENS = 15;

// A place in a text: a chunk, by its serial number, and a token of it. Chunk 0 is nowhere.
struct Position {
  uint32_t chunk = 0;
  uint32_t offset = 0;
};

// One cache line. Tokens that are not written yet are NO_TOKEN.
struct Chunk {
  uint32_t next;  // serial number of the chunk that continues the text; 0: none
  int32_t tokens[CHUNK_TOKENS];
};
static_assert(sizeof(Chunk) == 64);

// Several texts grow at the same time; each is a list of chunks. Serial numbers only grow, so that a position in an
// overwritten chunk is recognised: it reads as the end of its text.
class TextLog {
 public:
  // `num_chunks`: a power of two above 1, so that serial numbers may wrap around.
  explicit TextLog(uint32_t num_chunks) : chunks_(num_chunks), num_chunks_(num_chunks) {}

  // Writes `token` at `end` (nowhere, or overwritten: a new text begins), moves `end` after it and returns the token's
  // position. Opens the next chunk at once, so that each place in a text has one position only.
  Position append(Position& end, int32_t token) {
    if (!alive(end.chunk)) end = {open(), 0};
    const Position here = end;
    at(here.chunk).tokens[here.offset] = token;
    if (++end.offset == CHUNK_TOKENS) {
      end = {open(), 0};
      if (alive(here.chunk)) at(here.chunk).next = end.chunk;
    }
    return here;
  }

  // The token at `position`; NO_TOKEN where the text ends or is overwritten.
  int32_t read(Position position) const {
    return alive(position.chunk) ? at(position.chunk).tokens[position.offset] : NO_TOKEN;
  }

  // `count` tokens further; nowhere if the text does not reach that far or is overwritten.
  Position skip(Position position, uint32_t count) const {
    position.offset += count;
    while (position.offset >= CHUNK_TOKENS) {
      if (!alive(position.chunk)) return {};
      position = {at(position.chunk).next, position.offset - CHUNK_TOKENS};
    }
    return position;
  }

  // Hands out the oldest chunk, emptied.
  uint32_t open() {
    if (++newest_ == 0) ++newest_;  // 0 means nowhere
    Chunk& chunk = at(newest_);
    chunk.next = 0;
    for (int32_t& token : chunk.tokens) token = NO_TOKEN;
    return newest_;
  }

  bool alive(uint32_t serial) const { return serial != 0 && newest_ - serial < num_chunks_; }
  const Chunk& at(uint32_t serial) const { return chunks_[serial & (num_chunks_ - 1)]; }
  Chunk& at(uint32_t serial) { return chunks_[serial & (num_chunks_ - 1)]; }
  uint32_t newest() const { return newest_; }
  uint32_t num_chunks() const { return num_chunks_; }
  size_t bytes() const { return chunks_.bytes(); }

 private:
  Array<Chunk> chunks_;
  uint32_t num_chunks_;
  uint32_t newest_ = 0;  // serial number of the chunk handed out last
};

}  // namespace ngram
