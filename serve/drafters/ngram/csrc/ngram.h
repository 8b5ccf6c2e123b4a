// The drafter's core: running requests, the trie of their texts, and the thread that inserts them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "context.h"
#include "draft.h"
#include "history.h"
#include "insert_queue.h"
#include "options.h"
#include "trie.h"
#include "turns.h"
#include "warm_up.h"

namespace ngram {

struct Stats {
  uint64_t nodes, bytes, context_bytes;  // bytes of the trie, and of the running requests' own texts
  uint64_t inserted_tokens, dropped_tokens, waiting_tokens, evicted_nodes;
  uint64_t drafted_tokens;
  std::vector<uint64_t> match_lengths;  // [length]: proposals by length of the longest match; [0]: without a match
};

// The caller's arrays for a batch of B trees of N nodes.
struct Trees {
  size_t width;      // N
  int32_t* tokens;   // (B, N), as the next three; see Row
  int32_t* parents;
  float* scores;
  bool* foreign;
  int32_t* matches;  // (B,) lengths of the longest matches
};

// Any thread may call any method. Bad arguments throw std::invalid_argument and change nothing.
class Ngram {
 public:
  explicit Ngram(const Options& options);
  ~Ngram();

  // A request of namespace `name` starts in slot `row`. It sees the texts of namespace `common`, too, if there are any,
  // and does not feed it.
  void admit(int64_t row, const int32_t* tokens, size_t num_tokens, const std::string& name,
             const std::optional<std::string>& common);
  // Requests have gained the tokens that a step emitted, (B, 1 + K) with their number first, and get a tree of `width`
  // nodes each. Returns how many nodes each tree has (B,). Other requests see these tokens when this one has gained
  // more or has ended, at most as many as `release` says.
  std::vector<uint32_t> advance(const int64_t* rows, size_t batch, const int32_t* emitted, size_t num_columns,
                                const Trees& trees);
  // The request in `row` ended with `num_tokens`, prompt included.
  void release(int64_t row, size_t num_tokens);

  // Inserts a text at once.
  void insert(const int32_t* tokens, size_t num_tokens, const std::string& name);
  // Returns when everything queued is inserted.
  void flush() { queue_.flush(); }
  // See snapshot.h. `load` replaces the trie; no request may be running.
  void save(const std::string& path);
  void load(const std::string& path, int32_t vocab_size);

  Stats stats();
  // Every branch, least recently used first.
  std::vector<Branch> branches();
  // Throws Contradiction if the trie is inconsistent.
  void check();

 private:
  struct Request {
    explicit Request(const Options& options);
    bool is_running = false;
    bool is_lost = false;   // tokens were dropped: the next ones start a new text
    size_t num_shared = 0;  // tokens of its text that have been queued, or dropped
    Context context;
    std::vector<History> histories;  // in its namespace, and in the common one if it sees that

    uint32_t name() const { return histories.front().name(); }
  };

  Request& running(int64_t row);
  void check_rows(const int64_t* rows, size_t batch);
  void index_texts(const int64_t* rows, size_t batch);
  // Queues the new tokens among the first `num_tokens` of its text.
  void share(int64_t row, size_t num_tokens);
  std::vector<uint32_t> draft(const int64_t* rows, size_t batch, const Trees& trees);
  void follow(const int64_t* rows, size_t batch);
  void queue(int64_t row, JobKind kind, const int32_t* tokens, size_t num_tokens);
  void work() noexcept;
  void append_in_slices(Writer& writer, const int32_t* tokens, size_t num_tokens);

  const Options options_;
  std::mutex front_;  // requests and counters; locked before the trie
  std::vector<Request> requests_;
  int64_t num_running_ = 0;
  std::vector<size_t> num_steps_;  // of a batch: tokens to follow for each history
  uint64_t drafted_tokens_ = 0, dropped_tokens_ = 0;
  std::vector<uint64_t> match_lengths_;

  Turns turns_;  // trie and writers
  Trie trie_;
  Draft draft_;
  WarmUp warm_up_;
  std::vector<Writer> writers_;

  std::mutex inserting_;  // keeps `insert` and `load` apart; locked first
  InsertQueue queue_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace ngram
