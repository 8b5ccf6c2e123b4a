#include "snapshot.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>

namespace ngram {

namespace {

constexpr uint64_t MAGIC = 0x314549'52544D47;  // "GMTRIE1"
constexpr uint32_t VERSION = 1;

struct Header {
  uint64_t magic;
  uint32_t version, branch_length, num_names, num_nodes, num_leaves, num_chunks;
};

struct NodeRecord {
  uint32_t parent;  // place in the file, or ROOT | name
  int32_t token;
  uint32_t frequency;
  uint32_t chunk, offset;  // tail; chunk counts from 1
};

template <class T>
void put(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

uint64_t checksum(const char* bytes, size_t size) {
  uint64_t sum = size;
  for (; size >= 8; size -= 8, bytes += 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
    sum ^= sum >> 29;
  }
  for (; size > 0; --size, ++bytes) sum = (sum ^ static_cast<unsigned char>(*bytes)) * 0x100000001B3u;
  return sum;
}

// Ids of all nodes, parents before children, siblings in their order.
std::vector<uint32_t> in_order(const NodePool& nodes) {
  std::vector<uint32_t> ids;
  ids.reserve(nodes.size());
  for (uint32_t id = 1; id <= nodes.capacity() && ids.size() < nodes.size(); ++id) {
    if (nodes[id].birth != 0 && (nodes[id].parent & ROOT) != 0) ids.push_back(id);
  }
  for (size_t index = 0; index < ids.size(); ++index) {  // grows while it is walked
    if (nodes[ids[index]].is_leaf()) continue;
    for (uint32_t child = nodes[ids[index]].down; child != NONE; child = nodes[child].next) ids.push_back(child);
  }
  return ids;
}

}  // namespace

std::string Snapshot::write(const Trie& trie) {
  const NodePool& nodes = trie.nodes_;
  const TextLog& log = trie.log_;
  const std::vector<uint32_t> ids = in_order(nodes);
  std::vector<uint32_t> places(size_t{nodes.capacity()} + 1);
  for (size_t index = 0; index < ids.size(); ++index) places[ids[index]] = static_cast<uint32_t>(index);
  std::vector<uint32_t> numbers(trie.names_.size());
  std::string names, leaves, chunks;
  uint32_t num_names = 0;
  for (size_t number = 0; number < trie.names_.size(); ++number) {
    if (trie.names_[number].num_children == 0) continue;
    numbers[number] = num_names++;
    put(names, static_cast<uint32_t>(trie.names_[number].name.size()));
    names += trie.names_[number].name;
  }
  for (uint32_t leaf = nodes.oldest(); leaf != NONE; leaf = nodes.newer(leaf)) put(leaves, places[leaf]);
  uint32_t first = log.newest();
  while (first > 1 && log.alive(first - 1)) --first;  // where the numbers have begun again, older texts are left out
  const uint32_t num_chunks = first == 0 ? 0 : log.newest() - first + 1;
  const auto relative = [&](uint32_t serial) { return serial - first < num_chunks ? serial - first + 1 : 0; };
  for (uint32_t serial = first; serial - first < num_chunks; ++serial) {
    Chunk chunk = log.at(serial);
    chunk.next = relative(chunk.next);
    put(chunks, chunk);
  }
  std::string bytes;
  bytes.reserve(sizeof(Header) + names.size() + ids.size() * sizeof(NodeRecord) + leaves.size() + chunks.size() + 8);
  put(bytes, Header{MAGIC, VERSION, trie.branch_length_, num_names, static_cast<uint32_t>(ids.size()),
                    static_cast<uint32_t>(leaves.size() / sizeof(uint32_t)), num_chunks});
  bytes += names;
  for (const uint32_t id : ids) {
    const Node& node = nodes[id];
    const bool is_first_level = (node.parent & ROOT) != 0;
    const uint32_t parent = is_first_level ? ROOT | numbers[node.parent & ~ROOT] : places[node.parent];
    const Position tail = node.is_leaf() ? node.tail() : Position{};
    put(bytes, NodeRecord{parent, node.token, node.frequency, relative(tail.chunk), tail.offset});
  }
  bytes += leaves;
  bytes += chunks;
  put(bytes, checksum(bytes.data(), bytes.size()));
  return bytes;
}

void Snapshot::store(const std::string& bytes, const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) throw FileError(path, errno);
  const bool is_written = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
  int number = is_written ? 0 : errno;
  if (std::fclose(file) != 0 && number == 0) number = errno;
  if (number != 0) throw FileError(path, number);
}

// Reads untrusted bytes: every number is checked before it is used, and no more is read than the numbers of a header of
// ours allow.
class Snapshot::Reader {
 public:
  Reader(const std::string& path, uint32_t capacity, uint32_t branch_length, int32_t vocab_size)
      : path_(path),
        trie_(capacity, branch_length),
        vocab_size_(vocab_size),
        file_(std::fopen(path.c_str(), "rb"), &std::fclose) {
    if (file_ == nullptr) throw FileError(path, errno);
  }

  Trie read() {
    read_bytes(sizeof(Header));
    read_header();
    read_bytes(most_bytes() + 1);
    check_sum();
    read_names();
    read_nodes();
    read_leaves();
    read_chunks();
    set_tails();
    require(position_ + sizeof(uint64_t) == bytes_.size(), "has bytes too many");
    return std::move(trie_);
  }

 private:
  void require(bool holds, const std::string& what) const {
    if (!holds) throw std::invalid_argument("n-gram file " + path_ + " " + what);
  }
  template <class T>
  T take() {
    require(sizeof(T) <= bytes_.size() - position_, "is truncated; save it again");
    T value;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  // Until there are `count` bytes, or all of the file.
  void read_bytes(uint64_t count) {
    char block[1 << 16];
    while (bytes_.size() < count) {
      const size_t wanted = std::min<uint64_t>(sizeof(block), count - bytes_.size());
      const size_t size = std::fread(block, 1, wanted, file_.get());
      bytes_.append(block, size);
      if (std::ferror(file_.get()) != 0) throw FileError(path_, errno);
      if (size < wanted) return;
    }
  }

  uint64_t most_bytes() const {
    return sizeof(Header) + header_.num_names * uint64_t{sizeof(uint32_t) + MAX_NAME} +
           header_.num_nodes * uint64_t{sizeof(NodeRecord)} + header_.num_leaves * uint64_t{sizeof(uint32_t)} +
           header_.num_chunks * uint64_t{sizeof(Chunk)} + sizeof(uint64_t);
  }

  void read_header() {
    header_ = take<Header>();
    require(header_.magic == MAGIC, "is not a saved trie; name another file");
    require(header_.version == VERSION, "has version " + std::to_string(header_.version) + ", not " +
                                            std::to_string(VERSION) + "; save it again");
    require(header_.branch_length <= trie_.branch_length_,
            "has branches of " + std::to_string(header_.branch_length) + " tokens; raise branch_length");
    require(header_.num_nodes <= trie_.nodes_.capacity(),
            "has " + std::to_string(header_.num_nodes) + " nodes; raise capacity");
    require(header_.num_names <= header_.num_nodes && header_.num_leaves <= header_.num_nodes,
            "has a header that cannot be");
  }

  void check_sum() const {
    require(bytes_.size() <= most_bytes(), "has bytes too many");
    require(bytes_.size() >= sizeof(Header) + sizeof(uint64_t), "is truncated; save it again");
    uint64_t sum;
    std::memcpy(&sum, bytes_.data() + bytes_.size() - sizeof(sum), sizeof(sum));
    require(sum == checksum(bytes_.data(), bytes_.size() - sizeof(sum)), "is damaged or truncated; save it again");
  }

  void read_names() {
    for (uint32_t number = 0; number < header_.num_names; ++number) {
      const uint32_t size = take<uint32_t>();
      require(size <= MAX_NAME, "has a name that is too long");
      require(size <= bytes_.size() - position_, "is truncated; save it again");
      const std::string name = bytes_.substr(position_, size);
      position_ += size;
      require(trie_.numbers_.emplace(name, number).second, "names a namespace twice");
      trie_.names_.push_back({name, 0, 0});
    }
    trie_.free_names_.reserve(trie_.names_.capacity());
  }

  // Siblings are created last first, since each new one is listed before the others.
  void read_nodes() {
    for (uint32_t index = 0; index < header_.num_nodes; ++index) records_.push_back(take<NodeRecord>());
    ids_.resize(records_.size());
    for (size_t first = 0, end = 0; first < records_.size(); first = end) {
      while (end < records_.size() && records_[end].parent == records_[first].parent) ++end;
      for (size_t index = end; index > first; --index) read_node(index - 1, first);
    }
    for (const Namespace& space : trie_.names_) require(space.num_children > 0, "has an empty namespace");
  }

  void read_node(size_t index, size_t first) {
    const NodeRecord& record = records_[index];
    NodePool& nodes = trie_.nodes_;
    uint32_t parent = record.parent;
    require(0 <= record.token && record.token <= MAX_TOKEN && record.frequency > 0, "has a node that cannot be");
    if ((parent & ROOT) != 0) {
      require((parent & ~ROOT) < header_.num_names, "has a node without a namespace");
      ++trie_.names_[parent & ~ROOT].num_children;
    } else {
      require(parent < first, "has a node before its parent");
      parent = ids_[parent];
      require(nodes[parent].depth < trie_.branch_length_, "has a branch that is too long");
      require(record.frequency <= nodes[parent].frequency, "has a node used more often than its parent");
    }
    require_known(record.token);
    require(nodes.find(parent, record.token) == NONE, "has equal siblings");
    ids_[index] = nodes.create(parent, record.token, record.frequency);
  }

  void read_leaves() {
    NodePool& nodes = trie_.nodes_;
    for (uint32_t count = 0; count < header_.num_leaves; ++count) {
      const uint32_t index = take<uint32_t>();
      require(index < ids_.size(), "lists a leaf that it does not have");
      require(nodes[ids_[index]].is_leaf() && !nodes.is_listed(ids_[index]), "lists a leaf that is none");
      nodes.list_newest(ids_[index]);
    }
    const auto is_leaf = [&](uint32_t id) { return nodes[id].is_leaf(); };
    const auto num_leaves = std::count_if(ids_.begin(), ids_.end(), is_leaf);
    require(num_leaves == static_cast<int64_t>(header_.num_leaves), "does not list every leaf");
  }

  // A smaller log keeps the newest chunks.
  void read_chunks() {
    TextLog& log = trie_.log_;
    skipped_ = header_.num_chunks - std::min(header_.num_chunks, log.num_chunks());
    for (uint32_t number = 1; number <= header_.num_chunks; ++number) {
      const Chunk chunk = take<Chunk>();
      const auto is_token = [](int32_t token) { return NO_TOKEN <= token && token <= MAX_TOKEN; };
      require(std::all_of(std::begin(chunk.tokens), std::end(chunk.tokens), is_token), "has a token that cannot be");
      for (const int32_t token : chunk.tokens) require_known(token);
      require(chunk.next == 0 || (number < chunk.next && chunk.next <= header_.num_chunks), "has a broken text");
      if (number <= skipped_) continue;
      Chunk& kept = log.at(log.open());
      kept = chunk;
      kept.next = serial(chunk.next);
    }
  }

  void set_tails() {
    for (size_t index = 0; index < ids_.size(); ++index) {
      const NodeRecord& record = records_[index];
      require(record.chunk <= header_.num_chunks && record.offset < CHUNK_TOKENS, "has a tail outside its texts");
      Node& node = trie_.nodes_[ids_[index]];
      if (node.is_leaf()) node.set_tail({serial(record.chunk), record.offset});
    }
  }

  uint32_t serial(uint32_t chunk) const { return chunk > skipped_ ? chunk - skipped_ : 0; }

  void require_known(int32_t token) const {
    if (token < vocab_size_) return;
    require(false, "has token " + std::to_string(token) + ", and the target's end at " + std::to_string(vocab_size_ - 1) +
                       "; name one that was saved with this target's tokenizer");
  }

  const std::string& path_;
  Trie trie_;
  int32_t vocab_size_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  std::string bytes_;
  size_t position_ = 0;
  Header header_{};
  uint32_t skipped_ = 0;
  std::vector<NodeRecord> records_;
  std::vector<uint32_t> ids_;
};

Trie Snapshot::read(const std::string& path, uint32_t capacity, uint32_t branch_length, int32_t vocab_size) {
  return Reader(path, capacity, branch_length, vocab_size).read();
}

}  // namespace ngram
