// Threads that use the n-gram core all at once, for a sanitizer to watch: ngram_stress SECONDS FILE
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ngram.h"

namespace {

constexpr size_t BATCH = 4, GAINED = 3, WIDTH = 16;
constexpr int ANSWER_ROUNDS = 40;

std::atomic<bool> is_over{false};

// Few distinct tokens, so that texts share branches; half of a text repeats one of eight.
std::vector<int32_t> text(std::mt19937& random, size_t length) {
  std::vector<int32_t> tokens(length);
  const uint32_t topic = random() % 8;
  for (size_t index = 0; index < length; ++index) {
    tokens[index] = static_cast<int32_t>(random() % 4 == 0 ? random() % 200 : (topic * 31 + index * 7) % 200);
  }
  return tokens;
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "ngram_stress: %s\n", what);
  std::abort();
}

// What an engine does, in four rows of its own.
void serve(ngram::Ngram& core, int64_t first_row, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> rows(BATCH);
  for (size_t index = 0; index < BATCH; ++index) rows[index] = first_row + static_cast<int64_t>(index);
  std::vector<int32_t> tokens(BATCH * WIDTH), parents(BATCH * WIDTH), matches(BATCH);
  std::vector<float> scores(BATCH * WIDTH);
  const std::unique_ptr<bool[]> foreign(new bool[BATCH * WIDTH]);
  const ngram::Trees trees{WIDTH, tokens.data(), parents.data(), scores.data(), foreign.get(), matches.data()};
  std::vector<int32_t> emitted(BATCH * (1 + GAINED));
  while (!is_over) {
    for (const int64_t row : rows) {
      const std::vector<int32_t> prompt = text(random, 1 + random() % 100);
      core.admit(row, prompt.data(), prompt.size(), row % 2 == 0 ? "" : std::to_string(random() % 50), "");
    }
    for (int round = 0; round < ANSWER_ROUNDS; ++round) {
      const std::vector<int32_t> gained = text(random, BATCH * GAINED);
      for (size_t index = 0; index < BATCH; ++index) {
        emitted[index * (1 + GAINED)] = GAINED;
        std::copy_n(&gained[index * GAINED], GAINED, &emitted[index * (1 + GAINED) + 1]);
      }
      core.advance(rows.data(), BATCH, emitted.data(), 1 + GAINED, trees);
      for (size_t index = 0; index < BATCH; ++index) {
        require(tokens[index * WIDTH] == gained[index * GAINED + GAINED - 1], "a root is not the last token");
      }
    }
    for (const int64_t row : rows) core.release(row, random() % 200);
  }
}

void feed(ngram::Ngram& core, uint32_t seed) {
  std::mt19937 random(seed);
  while (!is_over) {
    const std::vector<int32_t> tokens = text(random, 300);
    core.insert(tokens.data(), tokens.size(), "");
  }
}

void watch(ngram::Ngram& core, const std::string& path) {
  while (!is_over) {
    core.check();
    core.save(path);
    core.branches();
    const ngram::Stats stats = core.stats();
    require(stats.nodes > 0, "an empty trie");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 3, "arguments: SECONDS FILE");
  ngram::Ngram core({2 * BATCH, 5000, 18, 1, 12, 4, 4096});
  core.insert(std::vector<int32_t>{1, 2, 3}.data(), 3, "");
  std::vector<std::thread> threads;
  threads.emplace_back(serve, std::ref(core), 0, 1);
  threads.emplace_back(serve, std::ref(core), BATCH, 2);
  threads.emplace_back(feed, std::ref(core), 3);
  threads.emplace_back(feed, std::ref(core), 4);
  threads.emplace_back(watch, std::ref(core), std::string(argv[2]));
  std::this_thread::sleep_for(std::chrono::duration<double>(std::atof(argv[1])));
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  core.load(argv[2], ngram::MAX_TOKEN + 1);
  core.check();
  const ngram::Stats stats = core.stats();
  uint64_t num_proposals = 0;
  for (const uint64_t count : stats.match_lengths) num_proposals += count;
  std::printf("%llu proposals, %llu tokens drafted, %llu dropped: no contradiction\n",
              static_cast<unsigned long long>(num_proposals), static_cast<unsigned long long>(stats.drafted_tokens),
              static_cast<unsigned long long>(stats.dropped_tokens));
}
