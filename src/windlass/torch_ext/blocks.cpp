// Blocks: torch's memory on a CPU, kept in the process up to a limit.
//
// Every result of at least kLeast bytes lies in a block of its own. A block that is freed stays in
// the process, and the next result of the same size takes it: steps repeat, so from the second one
// on most results find one. Where a new block would lift all of them above the limit, it is made of
// the pages of those unused for longest: the kernel moves pages from one address to another without
// touching what is in them. So a process holds what is alive, or the limit, whichever is more, and
// the system is asked for fresh pages, which it has to clear, only when there is no other way.

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <list>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kLeast = 128 << 10;  // smaller results are left to malloc
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kLeastPiece = 256 << 10;
constexpr size_t kMostPieces = 16384;  // Linux allows a process 65,530 mappings
constexpr size_t kAlignment = 64;

// A range of addresses, and the lengths of the mappings that follow each other in it.
struct Block {
  char* data;
  size_t size;
  std::vector<size_t> pieces;
};

// Tells torch's profiler, if one listens, what comes and goes.
class Reporter {
 public:
  void taken(void* data, size_t size) {
    if (!c10::memoryProfilingEnabled()) return;
    std::lock_guard<std::mutex> guard(mutex_);
    sizes_[data] = size;
    report(data, static_cast<int64_t>(size));
  }

  void given(void* data) {
    if (!c10::memoryProfilingEnabled()) return;
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = sizes_.find(data);
    if (found == sizes_.end()) return;
    report(data, -static_cast<int64_t>(found->second));
    sizes_.erase(found);
  }

 private:
  void report(void* data, int64_t change) {
    total_ += change;
    c10::reportMemoryUsageToProfiler(data, change, total_, 0, c10::Device(c10::DeviceType::CPU));
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
  size_t total_ = 0;
};

// Neither this nor the blocks are ever destroyed: tensors may outlive everything that C++ would end
// with the process.
Reporter& reporter() {
  static Reporter* const the = new Reporter;
  return *the;
}

class Blocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    if (wanted == 0) {
      return {nullptr, nullptr, &release_small, c10::Device(c10::DeviceType::CPU)};
    }
    if (wanted < kLeast) {
      void* data = nullptr;
      if (posix_memalign(&data, kAlignment, wanted) != 0) throw std::bad_alloc();
      reporter().taken(data, wanted);
      return {data, data, &release_small, c10::Device(c10::DeviceType::CPU)};
    }
    void* data = take((wanted + kPage - 1) / kPage * kPage);
    reporter().taken(data, wanted);
    return {data, data, &release_block, c10::Device(c10::DeviceType::CPU)};
  }

  // Torch may hand back any pointer through this one, so it tells blocks from small results.
  c10::DeleterFnPtr raw_deleter() const override { return &release_any; }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  void give(void* data, bool may_be_small) {
    reporter().given(data);
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = alive_.find(data);
    if (found == alive_.end()) {
      if (may_be_small) std::free(data);
      return;
    }
    live_ -= found->second.size;
    keep(std::move(found->second));
    alive_.erase(found);
    while (held_ > limit_ && !unused_.empty()) drop_oldest();
  }

  void set_limit(size_t limit) {
    std::lock_guard<std::mutex> guard(mutex_);
    limit_ = limit;
    piece_ = kLeastPiece;
    if (limit / kMostPieces > piece_) piece_ = (limit / kMostPieces + kPage - 1) / kPage * kPage;
    while (held_ > limit_ && !unused_.empty()) drop_oldest();
  }

  void tell(uint64_t* out) {
    std::lock_guard<std::mutex> guard(mutex_);
    out[0] = live_;
    out[1] = held_;
    out[2] = most_live_;
    out[3] = mapped_;
    most_live_ = live_;
  }

 private:
  using Unused = std::list<Block>;

  void* take(size_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = by_size_.find(size);
    Block block;
    if (found != by_size_.end() && !found->second.empty()) {
      block = remove(found->second.back());
    } else if (held_ + size <= limit_ || unused_.empty()) {
      block = fresh(size);
    } else {
      block = made_of_unused(size);
    }
    live_ += size;
    if (live_ > most_live_) most_live_ = live_;
    void* data = block.data;
    alive_.emplace(data, std::move(block));
    return data;
  }

  Block fresh(size_t size) { return {map(nullptr, size, PROT_READ | PROT_WRITE), size, {size}}; }

  Block made_of_unused(size_t size) {
    Block block{map(nullptr, size, PROT_NONE), size, {}};
    size_t done = 0;
    while (size - done >= piece_ && !unused_.empty()) {
      Block donor = remove(unused_.begin());
      while (!donor.pieces.empty() && size - done >= piece_) {
        size_t piece = donor.pieces.back();
        size_t moved = piece < size - done ? piece : size - done;
        char* from = donor.data + donor.size - moved;
        if (moved < piece_) {
          munmap(from, moved);
          held_ -= moved;
        } else {
          if (mremap(from, moved, moved, MREMAP_MAYMOVE | MREMAP_FIXED, block.data + done) ==
              MAP_FAILED) {
            throw std::bad_alloc();
          }
          block.pieces.push_back(moved);
          done += moved;
        }
        donor.size -= moved;
        donor.pieces.back() -= moved;
        if (donor.pieces.back() == 0) donor.pieces.pop_back();
      }
      if (donor.size > 0) keep_first(std::move(donor));
    }
    if (done < size) {
      while (held_ + size - done > limit_ && !unused_.empty()) drop_oldest();
      map(block.data + done, size - done, PROT_READ | PROT_WRITE);
      block.pieces.push_back(size - done);
    }
    return block;
  }

  // Maps fresh pages, at an address of ours or anywhere; only those that can be written count.
  char* map(char* at, size_t size, int protection) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
    void* data = mmap(at, size, protection, flags, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    if (protection != PROT_NONE) {
      if (size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);
      held_ += size;
      mapped_ += size;
    }
    return static_cast<char*>(data);
  }

  void keep(Block block) {
    unused_.push_back(std::move(block));
    by_size_[unused_.back().size].push_back(std::prev(unused_.end()));
  }

  void keep_first(Block block) {
    unused_.push_front(std::move(block));
    by_size_[unused_.front().size].push_back(unused_.begin());
  }

  Block remove(Unused::iterator at) {
    auto& same = by_size_[at->size];
    for (auto each = same.begin(); each != same.end(); ++each) {
      if (*each == at) {
        same.erase(each);
        break;
      }
    }
    Block block = std::move(*at);
    unused_.erase(at);
    return block;
  }

  void drop_oldest() {
    Block block = remove(unused_.begin());
    munmap(block.data, block.size);
    held_ -= block.size;
  }

  static void release_small(void* data) {
    reporter().given(data);
    std::free(data);
  }

  static void release_block(void* data);
  static void release_any(void* data);

  std::mutex mutex_;
  Unused unused_;  // oldest first
  std::unordered_map<size_t, std::vector<Unused::iterator>> by_size_;
  std::unordered_map<void*, Block> alive_;
  size_t limit_ = std::numeric_limits<size_t>::max();
  size_t piece_ = kLeastPiece;  // smaller ones are cleared anew, so that pieces stay few
  size_t live_ = 0;
  size_t held_ = 0;
  size_t most_live_ = 0;
  uint64_t mapped_ = 0;
};

Blocks& blocks() {
  static Blocks* const the = new Blocks;
  return *the;
}

void Blocks::release_block(void* data) { blocks().give(data, false); }
void Blocks::release_any(void* data) { blocks().give(data, true); }

}  // namespace

extern "C" {

// Has torch make all further tensors here.
void windlass_blocks_install() { c10::SetCPUAllocator(&blocks(), /*priority=*/1); }

// Bytes that mappings may hold together; what is alive may exceed it.
void windlass_blocks_limit(uint64_t limit) { blocks().set_limit(limit); }

// Bytes alive, bytes held, most bytes alive since the last call, bytes of fresh pages so far.
void windlass_blocks_tell(uint64_t* out) { blocks().tell(out); }
}
