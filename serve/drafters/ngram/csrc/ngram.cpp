#include "ngram.h"

#include <algorithm>
#include <stdexcept>

#include "snapshot.h"

namespace ngram {

namespace {

constexpr uint32_t NUM_FETCHED = 4;  // occurrences in the own text
constexpr size_t SLICE_TOKENS = 16;  // inserted while the trie is locked: some microseconds

const Options& validated(const Options& options) {
  options.validate();
  return options;
}

std::vector<Writer> make_writers(const Options& options) {
  std::vector<Writer> writers;  // not copies of one, which would reserve nothing
  writers.reserve(static_cast<size_t>(options.rows));
  for (int64_t row = 0; row < options.rows; ++row) writers.emplace_back(static_cast<uint32_t>(options.branch_length));
  return writers;
}

struct LastTurn {
  explicit LastTurn(Turns& turns) : turns_(turns) { turns.lock_last(); }
  ~LastTurn() { turns_.unlock(); }
  Turns& turns_;
};

}  // namespace

Ngram::Request::Request(const Options& options)
    : context(static_cast<uint32_t>(options.min_match), static_cast<uint32_t>(options.max_match)) {}

Ngram::Ngram(const Options& options)
    : options_(validated(options)),
      requests_(static_cast<size_t>(options.rows), Request(options)),
      match_lengths_(static_cast<size_t>(options.max_match) + 1),
      trie_(static_cast<uint32_t>(options.capacity), static_cast<uint32_t>(options.branch_length)),
      draft_(trie_, static_cast<uint32_t>(options.min_match), static_cast<uint32_t>(options.breadth)),
      warm_up_(trie_, static_cast<uint32_t>(options.max_match), static_cast<uint32_t>(options.breadth)),
      writers_(make_writers(options)),
      queue_(static_cast<size_t>(options.queue_tokens)),
      thread_([this] { work(); }) {}

Ngram::~Ngram() {
  queue_.stop();
  thread_.join();
}

void Ngram::admit(int64_t row, const int32_t* tokens, size_t num_tokens, const std::string& name,
                  const std::optional<std::string>& common) {
  std::lock_guard front(front_);
  if (row < 0 || row >= options_.rows) {
    throw std::invalid_argument("row is " + std::to_string(row) + "; it must be between 0 and " +
                                std::to_string(options_.rows - 1) + ", or rows larger");
  }
  Request& request = requests_[static_cast<size_t>(row)];
  if (request.is_running) throw std::invalid_argument("row " + std::to_string(row) + " is in use; release it first");
  if (num_tokens == 0) throw std::invalid_argument("tokens are empty; a request begins with at least one");
  check_tokens(tokens, num_tokens);
  {
    std::lock_guard turn(turns_);
    const bool sees_common = common.has_value() && *common != name && trie_.knows(*common);
    request.histories.resize(sees_common ? 2 : 1);
    request.histories[0].begin(trie_.enter(name));
    if (sees_common) request.histories[1].begin(trie_.enter(*common));
  }
  request.is_running = true;
  request.is_lost = false;
  request.context.clear();
  request.context.append(tokens, tokens + num_tokens);
  request.context.index();
  request.num_shared = num_tokens;
  const size_t count = std::min(num_tokens, static_cast<size_t>(options_.branch_length));
  queue_.set_busy(++num_running_ > 0);
  queue(row, JobKind::BEGIN, tokens + num_tokens - count, count);
}

void Ngram::release(int64_t row, size_t num_tokens) {
  std::lock_guard front(front_);
  Request& request = running(row);
  share(row, std::min(num_tokens, request.context.text().size()));
  queue(row, JobKind::END, nullptr, 0);
  if (request.histories.size() > 1) {
    std::lock_guard turn(turns_);
    trie_.leave(request.histories[1].name());
  }
  request.is_running = false;
  request.context = Request(options_).context;  // gives the memory back
  queue_.set_busy(--num_running_ > 0);
}

Ngram::Request& Ngram::running(int64_t row) {
  if (row < 0 || row >= options_.rows || !requests_[static_cast<size_t>(row)].is_running) {
    throw std::invalid_argument("row " + std::to_string(row) + " is not in use; admit a request first");
  }
  return requests_[static_cast<size_t>(row)];
}

void Ngram::check_rows(const int64_t* rows, size_t batch) {
  for (size_t index = 0; index < batch; ++index) running(rows[index]);
}

// Takes every step for all requests before the next one; see warm_up.h.
std::vector<uint32_t> Ngram::advance(const int64_t* rows, size_t batch, const int32_t* emitted, size_t num_columns,
                                     const Trees& trees) {
  std::lock_guard front(front_);
  check_rows(rows, batch);
  within("width", static_cast<int64_t>(trees.width), 1, MAX_WIDTH);
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
  std::vector<uint32_t> sizes = draft(rows, batch, trees);
  for (size_t index = 0; index < batch; ++index) {
    const size_t count = static_cast<size_t>(emitted[index * num_columns]);
    share(rows[index], running(rows[index]).context.text().size() - count);
  }
  return sizes;
}

std::vector<uint32_t> Ngram::draft(const int64_t* rows, size_t batch, const Trees& trees) {
  std::vector<uint32_t> sizes(batch);
  std::lock_guard turn(turns_);
  follow(rows, batch);
  for (size_t index = 0; index < batch; ++index) {
    const Request& request = running(rows[index]);
    const size_t start = index * trees.width;
    const Row row{static_cast<uint32_t>(trees.width), trees.tokens + start, trees.parents + start, trees.scores + start,
                  trees.foreign + start};
    const uint32_t match = draft_.propose(request.context, request.histories, row);
    trees.matches[index] = static_cast<int32_t>(match);
    if (trees.width > 1) ++match_lengths_[match];
    sizes[index] = draft_.size();
    drafted_tokens_ += draft_.size() - 1;
  }
  return sizes;
}

// Indexes the new tokens of their texts.
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
    for (const History& history : request.histories) {
      num_steps_.push_back(warm_up_.add(history, request.context.text()));
    }
  }
  const uint32_t* firsts = warm_up_.steps().data();
  const size_t* num_steps = num_steps_.data();
  for (size_t index = 0; index < batch; ++index) {
    Request& request = running(rows[index]);
    for (History& history : request.histories) {
      history.advance(trie_, request.context.text(), static_cast<uint32_t>(options_.max_match), firsts);
      firsts += *num_steps++;
      warm_up_.add_match(history);
    }
  }
  warm_up_.drafts();
}

void Ngram::share(int64_t row, size_t num_tokens) {
  Request& request = running(row);
  if (num_tokens <= request.num_shared) return;
  const int32_t* tokens = request.context.text().data() + request.num_shared;
  queue(row, request.is_lost ? JobKind::BEGIN : JobKind::EXTEND, tokens, num_tokens - request.num_shared);
  request.num_shared = num_tokens;
}

void Ngram::queue(int64_t row, JobKind kind, const int32_t* tokens, size_t num_tokens) {
  Request& request = requests_[static_cast<size_t>(row)];
  const Job job{kind, static_cast<int32_t>(row), static_cast<int32_t>(request.name()),
                static_cast<int32_t>(num_tokens)};
  request.is_lost = !queue_.push(job, tokens);
  if (request.is_lost) dropped_tokens_ += num_tokens;
}

void Ngram::work() noexcept {
  InsertQueue::Batch batch;
  while (queue_.take(batch)) {
    const int32_t* tokens = batch.tokens.data();
    for (const Job& job : batch.jobs) {
      Writer& writer = writers_[static_cast<size_t>(job.row)];
      const size_t num_tokens = static_cast<size_t>(job.num_tokens);
      if (job.kind == JobKind::END) {
        LastTurn turn(turns_);
        trie_.leave(static_cast<uint32_t>(job.name));
      }
      if (job.kind == JobKind::BEGIN) trie_.begin(writer, static_cast<uint32_t>(job.name));
      append_in_slices(writer, tokens, num_tokens);
      tokens += num_tokens;
    }
  }
}

void Ngram::append_in_slices(Writer& writer, const int32_t* tokens, size_t num_tokens) {
  for (size_t index = 0; index < num_tokens;) {
    const size_t end = std::min(num_tokens, index + SLICE_TOKENS);
    LastTurn turn(turns_);
    for (; index < end; ++index) trie_.append(writer, tokens[index]);
  }
}

void Ngram::insert(const int32_t* tokens, size_t num_tokens, const std::string& name) {
  check_tokens(tokens, num_tokens);
  std::lock_guard inserting(inserting_);
  Writer writer(static_cast<uint32_t>(options_.branch_length));
  {
    std::lock_guard turn(turns_);
    trie_.begin(writer, trie_.enter(name));
  }
  append_in_slices(writer, tokens, num_tokens);
  std::lock_guard turn(turns_);
  trie_.leave(writer.name);
}

void Ngram::save(const std::string& path) {
  flush();
  std::string bytes;
  {
    std::lock_guard turn(turns_);
    bytes = Snapshot::write(trie_);
  }
  Snapshot::store(bytes, path);
}

void Ngram::load(const std::string& path, int32_t vocab_size) {
  std::lock_guard inserting(inserting_);
  std::lock_guard front(front_);
  if (num_running_ > 0) {
    throw std::invalid_argument("requests are running; load " + path + " before the first or after the last");
  }
  flush();
  Trie loaded = Snapshot::read(path, static_cast<uint32_t>(options_.capacity),
                               static_cast<uint32_t>(options_.branch_length), vocab_size);
  std::lock_guard turn(turns_);
  trie_ = std::move(loaded);
}

Stats Ngram::stats() {
  std::lock_guard front(front_);
  std::lock_guard turn(turns_);
  Stats stats{};
  stats.nodes = trie_.nodes().size();
  stats.bytes = trie_.bytes();
  for (const Request& request : requests_) stats.context_bytes += request.context.bytes();
  stats.inserted_tokens = trie_.num_inserted();
  stats.dropped_tokens = dropped_tokens_;
  stats.waiting_tokens = queue_.num_waiting();
  stats.evicted_nodes = trie_.num_evicted();
  stats.drafted_tokens = drafted_tokens_;
  stats.match_lengths = match_lengths_;
  return stats;
}

std::vector<Branch> Ngram::branches() {
  flush();
  std::lock_guard turn(turns_);
  std::vector<Branch> branches;
  for (uint32_t leaf = trie_.nodes().oldest(); leaf != NONE; leaf = trie_.nodes().newer(leaf)) {
    branches.push_back(trie_.branch(leaf));
  }
  return branches;
}

void Ngram::check() {
  flush();
  std::lock_guard turn(turns_);
  trie_.check();
}

}  // namespace ngram
