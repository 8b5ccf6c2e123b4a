// What the rounds ask of the core. Every step is taken for all requests before the next one; see warm_up.h.
#include <algorithm>
#include <mutex>

#include "ngram.h"

namespace ngram {

namespace {

constexpr uint32_t NUM_FETCHED = 4;  // occurrences in the own text
constexpr size_t MAX_GUESSED = 3;  // tokens that a rehearsal takes for emitted

// The likeliest tokens: the first child of the root, its first child, and so on. Returns how many.
size_t guess(const Row& row, uint32_t size, int32_t* tokens) {
  size_t count = 0;
  int32_t last = 0;
  for (uint32_t node = 1; node < size && count < MAX_GUESSED; ++node) {
    if (row.parents[node] != last) continue;
    tokens[count++] = row.tokens[node];
    last = static_cast<int32_t>(node);
  }
  return count;
}

}  // namespace

void Ngram::extend(const int64_t* rows, size_t batch, const int32_t* tokens, size_t width) {
  std::lock_guard front(front_);
  check_rows(rows, batch);
  check_tokens(tokens, batch * width, /*is_padded=*/true);
  for (size_t index = 0; index < batch; ++index) {
    const int32_t* gained = tokens + index * width;
    running(rows[index]).context.append(gained, std::find(gained, gained + width, NO_TOKEN));
  }
  index_texts(rows, batch);
  for (size_t index = 0; index < batch; ++index) share(rows[index], running(rows[index]).context.text().size());
}

std::vector<uint32_t> Ngram::propose(const int64_t* rows, size_t batch, size_t width, int32_t* tokens,
                                     int32_t* parents, int32_t* matches, int64_t* ancestors) {
  std::lock_guard front(front_);
  check_rows(rows, batch);
  within("width", static_cast<int64_t>(width), 1, MAX_WIDTH);
  return draft(rows, batch, width, tokens, parents, matches, ancestors);
}

std::vector<uint32_t> Ngram::advance(const int64_t* rows, size_t batch, const int32_t* emitted, size_t num_columns,
                                     size_t width, int32_t* tokens, int32_t* parents, int32_t* matches) {
  std::lock_guard front(front_);
  check_rows(rows, batch);
  within("width", static_cast<int64_t>(width), 1, MAX_WIDTH);
  for (size_t index = 0; index < batch; ++index) {
    const int32_t* row = emitted + index * num_columns;
    within("a number of tokens", row[0], 0, static_cast<int64_t>(num_columns) - 1);
    check_tokens(row + 1, static_cast<size_t>(row[0]));
    running(rows[index]).context.prefetch_end();
  }
  for (size_t index = 0; index < batch; ++index) {
    const int32_t* row = emitted + index * num_columns;
    running(rows[index]).context.append(row + 1, row + 1 + row[0]);
  }
  index_texts(rows, batch);
  std::vector<uint32_t> sizes = draft(rows, batch, width, tokens, parents, matches, nullptr);
  for (size_t index = 0; index < batch; ++index) {
    const size_t count = static_cast<size_t>(emitted[index * num_columns]);
    share(rows[index], running(rows[index]).context.text().size() - count);
  }
  return sizes;
}

void Ngram::warm(const int64_t* rows, size_t batch, size_t width) {
  std::lock_guard front(front_);
  check_rows(rows, batch);
  within("width", static_cast<int64_t>(width), 1, MAX_WIDTH);
  const std::unique_lock turn(turns_, std::try_to_lock);
  if (turn.owns_lock()) rehearse(rows, batch, static_cast<uint32_t>(width));
}

// Goes through a round and forgets it: what is drafted behind the texts, and behind the likeliest tokens that may come.
void Ngram::rehearse(const int64_t* rows, size_t batch, uint32_t width) {
  kept_.resize(std::max(kept_.size(), batch));
  num_guessed_.assign(batch, 0);
  for (size_t index = 0; index < batch; ++index) kept_[index] = running(rows[index]).history;
  int32_t tokens[MAX_WIDTH], parents[MAX_WIDTH], guessed[MAX_GUESSED];
  const Row row{width, tokens, parents, nullptr};
  follow(rows, batch);
  for (size_t index = 0; index < batch; ++index) {
    Request& request = running(rows[index]);
    draft_.propose(request.context, request.history, row);
    num_guessed_[index] = guess(row, draft_.size(), guessed);
    request.context.append(guessed, guessed + num_guessed_[index]);
  }
  for (size_t index = 0; index < batch; ++index) running(rows[index]).context.prefetch_slots();
  follow(rows, batch);
  for (size_t index = 0; index < batch; ++index) {
    Request& request = running(rows[index]);
    draft_.propose(request.context, request.history, row);
  }
  for (size_t index = batch; index-- > 0;) {
    Request& request = running(rows[index]);
    request.context.drop(num_guessed_[index]);
    std::swap(request.history, kept_[index]);
  }
}

std::vector<uint32_t> Ngram::draft(const int64_t* rows, size_t batch, size_t width, int32_t* tokens, int32_t* parents,
                                   int32_t* matches, int64_t* ancestors) {
  std::vector<uint32_t> sizes(batch);
  std::lock_guard turn(turns_);
  follow(rows, batch);
  for (size_t index = 0; index < batch; ++index) {
    const Request& request = running(rows[index]);
    const size_t start = index * width;
    int64_t* masks = ancestors == nullptr ? nullptr : ancestors + start;
    const Row row{static_cast<uint32_t>(width), tokens + start, parents + start, masks};
    const uint32_t match = draft_.propose(request.context, request.history, row);
    matches[index] = static_cast<int32_t>(match);
    if (width > 1) ++match_lengths_[match];
    sizes[index] = draft_.size();
    drafted_tokens_ += draft_.size() - 1;
  }
  return sizes;
}

// Takes in what their texts have gained.
void Ngram::index_texts(const int64_t* rows, size_t batch) {
  for (size_t index = 0; index < batch; ++index) running(rows[index]).context.prefetch_slots();
  for (size_t index = 0; index < batch; ++index) running(rows[index]).context.prefetch_grams();
  for (size_t index = 0; index < batch; ++index) running(rows[index]).context.index();
  for (uint32_t newer = 0; newer < NUM_FETCHED; ++newer) {
    for (size_t index = 0; index < batch; ++index) running(rows[index]).context.prefetch_search(newer);
  }
}

// Moves the requests' histories to the ends of their texts.
void Ngram::follow(const int64_t* rows, size_t batch) {
  num_steps_.clear();
  warm_up_.clear();
  for (size_t index = 0; index < batch; ++index) {
    const Request& request = running(rows[index]);
    num_steps_.push_back(warm_up_.add(request.history, request.context.text()));
  }
  const uint32_t* firsts = warm_up_.steps().data();
  for (size_t index = 0; index < batch; ++index) {
    Request& request = running(rows[index]);
    request.history.advance(trie_, request.context.text(), static_cast<uint32_t>(options_.max_match), firsts);
    firsts += num_steps_[index];
    warm_up_.add_match(request.history);
  }
  warm_up_.drafts();
}

}  // namespace ngram
