// A caching CPU allocator for torch with a limit on the memory that it reserves.
//
// Every tensor of at least kMinBlockBytes gets a block of its own. New blocks lie side by side in
// regions of huge pages, so that tensors smaller than a huge page lie in one too. A freed block
// stays in the process, and the next tensor of the same size reuses it: steps repeat, so from the
// second one on most tensors find a block. If a new block would exceed the limit, the smallest free
// block that is large enough is split, and its parts become one block again once both are free.
// Where there is none, a block is assembled from the pages of the least recently used free blocks:
// the kernel remaps pages to another address without touching their content, but it breaks up huge
// pages. So the process reserves the allocated memory or the limit, whichever is larger, and
// requests new pages, which the system has to clear, only when there is no other way.

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kMinBlockBytes = 128 << 10;  // smaller tensors are left to malloc
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kMinPieceBytes = 256 << 10;
constexpr size_t kMaxPieces = 16384;  // Linux allows a process 65,530 mappings
constexpr size_t kAlignment = 64;
constexpr size_t kRegionBytes = 64 << 20;  // of addresses; pages exist once they are touched

// A range of addresses, the lengths of the consecutive mappings in it, and the block that it was
// split from: neighbours of one origin can be joined again.
struct Block {
  char* data;
  size_t size;
  std::vector<size_t> pieces;
  uint64_t origin;
};

// Reports allocations to torch's profiler, if it is active.
class ProfilerReporter {
 public:
  void allocated(void* data, size_t size) {
    if (!c10::memoryProfilingEnabled()) return;
    std::lock_guard<std::mutex> guard(mutex_);
    sizes_[data] = size;
    report(data, static_cast<int64_t>(size));
  }

  void freed(void* data) {
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

// Neither this nor the blocks are ever destroyed: tensors may outlive the objects that C++ destroys
// at process exit.
ProfilerReporter& reporter() {
  static ProfilerReporter* const instance = new ProfilerReporter;
  return *instance;
}

class Blocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) {
      return {nullptr, nullptr, &release_small, c10::Device(c10::DeviceType::CPU)};
    }
    if (size < kMinBlockBytes) {
      void* data = nullptr;
      if (posix_memalign(&data, kAlignment, size) != 0) throw std::bad_alloc();
      reporter().allocated(data, size);
      return {data, data, &release_small, c10::Device(c10::DeviceType::CPU)};
    }
    void* data = take_block((size + kPage - 1) / kPage * kPage);
    reporter().allocated(data, size);
    return {data, data, &release_block, c10::Device(c10::DeviceType::CPU)};
  }

  // torch may free any pointer through this one, so it distinguishes blocks from small tensors.
  c10::DeleterFnPtr raw_deleter() const override { return &release_any; }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  void free_block(void* data, bool may_be_small) {
    reporter().freed(data);
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = allocated_blocks_.find(data);
    if (found == allocated_blocks_.end()) {
      if (may_be_small) std::free(data);
      return;
    }
    allocated_ -= found->second.size;
    cache(std::move(found->second));
    allocated_blocks_.erase(found);
    while (reserved_ > limit_ && !free_.empty()) release_oldest();
  }

  void set_limit(size_t limit) {
    std::lock_guard<std::mutex> guard(mutex_);
    limit_ = limit;
    min_piece_ = kMinPieceBytes;
    if (limit / kMaxPieces > min_piece_) {
      min_piece_ = (limit / kMaxPieces + kPage - 1) / kPage * kPage;
    }
    while (reserved_ > limit_ && !free_.empty()) release_oldest();
  }

  void stats(uint64_t* out) {
    std::lock_guard<std::mutex> guard(mutex_);
    out[0] = allocated_;
    out[1] = reserved_;
    out[2] = peak_allocated_;
    out[3] = mapped_;
    peak_allocated_ = allocated_;
  }

 private:
  using FreeList = std::list<Block>;

  void* take_block(size_t size) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = by_size_.find(size);
    Block block;
    if (found != by_size_.end()) {
      block = remove(found->second.back());
    } else if (reserved_ + size <= limit_ || free_.empty()) {
      block = new_block(size);
    } else if (auto larger = by_size_.lower_bound(size); larger != by_size_.end()) {
      block = split(remove(larger->second.back()), size);
    } else {
      block = assemble_block(size);
    }
    allocated_ += block.size;
    if (allocated_ > peak_allocated_) peak_allocated_ = allocated_;
    void* data = block.data;
    allocated_blocks_.emplace(data, std::move(block));
    return data;
  }

  // New blocks lie side by side, so that small ones share huge pages too.
  Block new_block(size_t size) {
    if (size > static_cast<size_t>(end_ - next_)) start_region(size);
    char* data = next_;
    next_ += size;
    reserved_ += size;
    mapped_ += size;
    return {data, size, {size}, ++origins_};
  }

  // Addresses for new blocks; none of their pages exists before it is first touched.
  void start_region(size_t size) {
    if (end_ > next_) munmap(next_, static_cast<size_t>(end_ - next_));
    next_ = end_ = nullptr;
    size_t length = (size > kRegionBytes ? size : kRegionBytes) + kHugePage;
    char* start = map_pages(nullptr, length, PROT_READ | PROT_WRITE);
    next_ = start + (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
    if (next_ > start) munmap(start, static_cast<size_t>(next_ - start));
    end_ = start + length;
  }

  // The first bytes of a block; the rest is cached, unless it is too small to be of use.
  Block split(Block block, size_t size) {
    if (block.size - size < min_piece_) return block;
    Block rest{block.data + size, block.size - size, {}, block.origin};
    size_t kept = 0;
    for (size_t piece : block.pieces) {
      size_t first = kept + piece <= size ? piece : (kept < size ? size - kept : 0);
      if (first < piece) rest.pieces.push_back(piece - first);
      kept += piece;
    }
    size_t excess = rest.size;
    while (block.pieces.back() <= excess) {
      excess -= block.pieces.back();
      block.pieces.pop_back();
    }
    block.pieces.back() -= excess;
    block.size = size;
    cache(std::move(rest));
    return block;
  }

  Block assemble_block(size_t size) {
    Block block{map(nullptr, size, PROT_NONE), size, {}, ++origins_};
    size_t done = 0;
    while (size - done >= min_piece_ && !free_.empty()) {
      Block donor = remove(free_.begin());
      while (!donor.pieces.empty() && size - done >= min_piece_) {
        size_t piece = donor.pieces.back();
        size_t moved = piece < size - done ? piece : size - done;
        char* from = donor.data + donor.size - moved;
        if (moved < min_piece_) {
          munmap(from, moved);
          reserved_ -= moved;
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
      if (donor.size > 0) cache_first(std::move(donor));
    }
    if (done < size) {
      while (reserved_ + size - done > limit_ && !free_.empty()) release_oldest();
      map(block.data + done, size - done, PROT_READ | PROT_WRITE);
      block.pieces.push_back(size - done);
    }
    return block;
  }

  // Maps new pages, at a given address or anywhere; only writable ones count as reserved.
  char* map(char* at, size_t size, int protection) {
    char* data = map_pages(at, size, protection);
    if (protection != PROT_NONE) {
      reserved_ += size;
      mapped_ += size;
    }
    return data;
  }

  static char* map_pages(char* at, size_t size, int protection) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
    void* data = mmap(at, size, protection, flags, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    if (protection != PROT_NONE && size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);
    return static_cast<char*>(data);
  }

  void cache(Block block) {
    block = join_neighbours(std::move(block));
    free_.push_back(std::move(block));
    index(std::prev(free_.end()));
  }

  void cache_first(Block block) {
    free_.push_front(std::move(block));
    index(free_.begin());
  }

  void index(FreeList::iterator at) {
    by_size_[at->size].push_back(at);
    by_address_[at->data] = at;
  }

  // The block with the free blocks before and after it that were split from the same one.
  Block join_neighbours(Block block) {
    auto next = by_address_.find(block.data + block.size);
    if (next != by_address_.end() && next->second->origin == block.origin) {
      append(block, remove(next->second));
    }
    auto before = by_address_.lower_bound(block.data);
    if (before == by_address_.begin()) return block;
    FreeList::iterator at = std::prev(before)->second;
    if (at->data + at->size != block.data || at->origin != block.origin) return block;
    Block joined = remove(at);
    append(joined, std::move(block));
    return joined;
  }

  static void append(Block& block, Block next) {
    block.pieces.insert(block.pieces.end(), next.pieces.begin(), next.pieces.end());
    block.size += next.size;
  }

  Block remove(FreeList::iterator at) {
    auto found = by_size_.find(at->size);
    auto& same = found->second;
    for (auto each = same.begin(); each != same.end(); ++each) {
      if (*each == at) {
        same.erase(each);
        break;
      }
    }
    if (same.empty()) by_size_.erase(found);
    by_address_.erase(at->data);
    Block block = std::move(*at);
    free_.erase(at);
    return block;
  }

  void release_oldest() {
    Block block = remove(free_.begin());
    munmap(block.data, block.size);
    reserved_ -= block.size;
  }

  static void release_small(void* data) {
    reporter().freed(data);
    std::free(data);
  }

  static void release_block(void* data);
  static void release_any(void* data);

  std::mutex mutex_;
  FreeList free_;  // oldest first
  std::map<size_t, std::vector<FreeList::iterator>> by_size_;
  std::map<char*, FreeList::iterator> by_address_;
  std::unordered_map<void*, Block> allocated_blocks_;
  size_t limit_ = std::numeric_limits<size_t>::max();
  size_t min_piece_ = kMinPieceBytes;  // smaller pieces are not remapped, to keep mappings few
  size_t allocated_ = 0;
  size_t reserved_ = 0;
  size_t peak_allocated_ = 0;
  uint64_t mapped_ = 0;
  char* next_ = nullptr;  // the rest of the region that new blocks are taken from
  char* end_ = nullptr;
  uint64_t origins_ = 0;
};

Blocks& blocks() {
  static Blocks* const instance = new Blocks;
  return *instance;
}

void Blocks::release_block(void* data) { blocks().free_block(data, false); }
void Blocks::release_any(void* data) { blocks().free_block(data, true); }

}  // namespace

extern "C" {

// Makes torch allocate all further CPU tensors here.
void windlass_blocks_install() { c10::SetCPUAllocator(&blocks(), /*priority=*/1); }

// Limits the reserved bytes; allocated memory may exceed the limit.
void windlass_blocks_limit(uint64_t limit) { blocks().set_limit(limit); }

// Bytes allocated, bytes reserved, peak bytes allocated since the last call, bytes ever mapped.
void windlass_blocks_stats(uint64_t* out) { blocks().stats(out); }
}
