#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "fiber.h"
#include "host_emulation.h"
#include "races.h"

namespace longspark::emulation {

namespace {

constexpr size_t kArenaBytes =
    96 * 1024;  // below the least dynamic limit of the GPUs meant (99 KiB)
constexpr size_t kStaticLimit = 48 * 1024;

struct Settings {
  uint64_t seed = 1;
  Order order = Order::kRandom;
};
thread_local Settings settings;

struct Range {
  const char* begin;
  const char* end;
  bool writable;
  const char* name;
  std::unique_ptr<RaceRecords> races;  // of what may be stored to, from the first access on
};
thread_local std::vector<Range> ranges;
thread_local int scopes = 0;

enum class State { kReady, kAtBlockBarrier, kAtWarpCollective, kDone };

struct Thread {
  Identity identity;
  int index, warp, lane;
  State state;
  Site site;
  const char* waiting_for;
  size_t bytes;         // of the collective's value
  int64_t collectives;  // taken part in so far
  Fiber fiber;
};

struct Allocation {
  Site site;
  size_t begin, bytes;
};

class BlockRun;
thread_local BlockRun* current = nullptr;

std::string describe(const dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

// Memory reused from block to block.
struct Arena {
  std::unique_ptr<char[]> storage{new char[kArenaBytes + 128]};
  char* base =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(storage.get()) + 127) & ~127ull);
  RaceRecords races{kArenaBytes};
  uint32_t block_runs = 0, block_barriers = 0;
};
thread_local std::unique_ptr<Arena> arena;

class BlockRun {
 public:
  BlockRun(dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()>& kernel)
      : kernel_(kernel),
        count_(block.x),
        dynamic_bytes_((dynamic_bytes + 127) / 128 * 128),
        threads_(block.x) {
    if (block.y != 1 || block.z != 1 || count_ % kWarpSize || count_ == 0 || count_ > 1024) {
      throw std::runtime_error("emulation: block size " + describe(block) +
                               " is not a multiple of 32 up to 1024 in x alone");
    }
    if (!arena) arena = std::make_unique<Arena>();
    launch_begin_ = arena->block_runs + 1;
    warps_.resize(count_ / kWarpSize);
    for (int i = 0; i < count_; ++i) {
      Thread& t = threads_[i];
      t.index = i;
      t.warp = i / kWarpSize;
      t.lane = i % kWarpSize;
      t.identity = {dim3(i, 0, 0), dim3(), block, grid};
    }
  }

  void run(dim3 block_index, std::mt19937_64& random) {
    begin(block_index);
    current = this;
    for (Thread& t : threads_) t.fiber.start([this, &t] { body(t); });
    while (!ready_.empty()) {
      size_t pick = choose(random);
      running_ = ready_[pick];
      ready_.erase(ready_.begin() + pick);
      running_->fiber.resume();
      if (failure_) break;
    }
    current = nullptr;
    if (!failure_ && done_ != count_) failure_ = std::make_exception_ptr(stuck());
    if (failure_) std::rethrow_exception(failure_);
  }

  const Identity& self() const { return running_->identity; }

  void* shared(Site site, size_t bytes, size_t alignment) {
    for (const Allocation& a : allocations_) {
      if (a.site.line == site.line && !std::strcmp(a.site.file, site.file)) {
        return arena->base + a.begin;
      }
    }
    size_t begin = (used_ + alignment - 1) / alignment * alignment;
    if (begin + bytes > std::min(kStaticLimit, kArenaBytes - dynamic_bytes_)) {
      throw error("shared memory declarations need more than 48 KiB", site);
    }
    used_ = begin + bytes;
    allocations_.push_back({site, begin, bytes});
    return arena->base + begin;
  }

  void* dynamic_shared() { return arena->base + kArenaBytes - dynamic_bytes_; }  // 128-byte aligned

  void access(const void* address, size_t bytes, size_t alignment, bool is_store, Site site) {
    if (reinterpret_cast<uintptr_t>(address) % alignment) {
      throw error("misaligned access: an address that is no multiple of " +
                      std::to_string(alignment) + " bytes",
                  site);
    }
    const char* at = static_cast<const char*>(address);
    if (at >= arena->base && at < arena->base + kArenaBytes) {
      access_shared(at - arena->base, bytes, is_store, site);
    } else {
      access_global(at, bytes, is_store, site);
    }
  }

  void block_barrier(Site site) {
    wait(State::kAtBlockBarrier, "__syncthreads", site);
    if (done_ > 0) {
      throw error(
          "divergent barrier: a thread has left the kernel while this one waits at __syncthreads",
          site);
    }
    if (++at_barrier_ < count_) return yield();
    for (const Thread& t : threads_) {
      if (t.site.line != site.line) {
        throw error("divergent barrier: other threads of the block wait at line " +
                        std::to_string(t.site.line),
                    site);
      }
    }
    ++arena->block_barriers;
    at_barrier_ = 0;
    release(0, count_);
  }

  const void* warp_exchange(unsigned mask, const void* value, size_t bytes, bool orders_memory,
                            const char* what, Site site) {
    if (mask != 0xffffffffu) throw error(std::string(what) + " must name all 32 lanes", site);
    Thread& me = *running_;
    Warp& warp = warps_[me.warp];
    // Two buffers: a lane can't reach its next collective but one before all have read this one.
    char* buffer = warp.buffer[me.collectives++ % 2];
    if (bytes) std::memcpy(buffer + me.lane * bytes, value, bytes);
    me.bytes = bytes;
    wait(State::kAtWarpCollective, what, site);
    if (warp.done > 0) {
      throw error(std::string("divergent collective: a lane has left the kernel before ") + what,
                  site);
    }
    if (++warp.waiting < kWarpSize) {
      yield();
      return buffer;
    }
    for (int i = 0; i < kWarpSize; ++i) {
      const Thread& t = threads_[me.warp * kWarpSize + i];
      if (std::strcmp(t.waiting_for, what) || t.site.line != site.line || t.bytes != bytes) {
        throw error(std::string("divergent collective: other lanes of the warp wait at ") +
                        t.waiting_for + ", line " + std::to_string(t.site.line),
                    site);
      }
    }
    if (orders_memory) ++warp.barriers;
    warp.waiting = 0;
    release(me.warp * kWarpSize, kWarpSize);
    return buffer;
  }

 private:
  struct Warp {
    uint32_t barriers = 0;  // never reset, as the block's
    int waiting, done;
    alignas(16) char buffer[2][kWarpSize * kMostExchanged];
  };

  void begin(dim3 block_index) {
    std::memset(arena->base, 0xff, kArenaBytes);
    ++arena->block_runs;
    ++arena->block_barriers;
    allocations_.clear();
    used_ = 0;
    done_ = at_barrier_ = 0;
    for (Warp& warp : warps_) warp.waiting = warp.done = 0;
    ready_.clear();
    for (Thread& t : threads_) {
      t.identity.block = block_index;
      t.state = State::kReady;
      t.collectives = 0;
      ready_.push_back(&t);
    }
  }

  size_t choose(std::mt19937_64& random) const {
    switch (settings.order) {
      case Order::kForward:
        return 0;
      case Order::kReversed:
        return ready_.size() - 1;
      default:
        return random() % ready_.size();
    }
  }

  void body(Thread& t) {
    try {
      kernel_();
      if (at_barrier_ > 0) {
        throw error(
            "divergent barrier: this thread leaves the kernel while another waits at __syncthreads",
            {"the kernel's end", 0});
      }
    } catch (...) {
      failure_ = std::current_exception();
    }
    t.state = State::kDone;
    ++done_;
    ++warps_[t.warp].done;
  }

  void wait(State state, const char* what, Site site) {
    running_->state = state;
    running_->waiting_for = what;
    running_->site = site;
  }

  void yield() { running_->fiber.yield(); }

  // The releasing thread goes on at once; the others join the ready ones.
  void release(int first, int count) {
    for (int i = first; i < first + count; ++i) {
      threads_[i].state = State::kReady;
      if (&threads_[i] != running_) ready_.push_back(&threads_[i]);
    }
    if (settings.order != Order::kForward) {
      // Whoever arrived last would always go on first; let the order decide instead.
      ready_.push_back(running_);
      yield();
    }
  }

  void access_global(const char* at, size_t bytes, bool is_store, Site site) {
    const Range* near = nullptr;
    for (size_t i = 0; i < ranges.size(); ++i) {
      // Accesses to one tensor come in runs: begin with the one that was right last time.
      Range& r = ranges[(latest_range_ + i) % ranges.size()];
      if (at >= r.begin && at + bytes <= r.end) {
        latest_range_ = &r - ranges.data();
        if (is_store && !r.writable) {
          throw error(std::string("store to ") + r.name + ", which is an input", site);
        }
        if (r.writable) {
          if (!r.races) r.races = std::make_unique<RaceRecords>(r.end - r.begin);
          std::string wrong = r.races->access(at - r.begin, bytes, is_store, now(), launch_begin_);
          if (!wrong.empty()) throw error(wrong + " (" + r.name + ")", site);
        }
        return;
      }
      if (at >= r.begin && (near == nullptr || r.end > near->end)) near = &r;
    }
    std::string where =
        near == nullptr ? "before every tensor of the call"
                        : std::string("at byte ") + std::to_string(at - near->begin) + " of " +
                              near->name + ", which has " + std::to_string(near->end - near->begin);
    throw error(std::string("out-of-bounds ") + (is_store ? "store" : "load") + " of " +
                    std::to_string(bytes) + " bytes: " + where,
                site);
  }

  bool is_allocated(size_t begin, size_t bytes) const {
    if (begin >= kArenaBytes - dynamic_bytes_) return begin + bytes <= kArenaBytes;
    for (const Allocation& a : allocations_) {
      if (begin >= a.begin && begin + bytes <= a.begin + a.bytes) return true;
    }
    return false;
  }

  Moment now() const {
    return {running_->index, arena->block_runs, arena->block_barriers,
            warps_[running_->warp].barriers};
  }

  void access_shared(size_t begin, size_t bytes, bool is_store, Site site) {
    if (!is_allocated(begin, bytes)) throw error("access outside the shared memory", site);
    // Each block has shared memory of its own; that they use the same bytes here is no race.
    std::string wrong = arena->races.access(begin, bytes, is_store, now(), arena->block_runs);
    if (!wrong.empty()) throw error(wrong, site);
    if (!is_store && !arena->races.was_stored(begin, bytes, arena->block_runs)) {
      throw error("load of shared memory that was never stored to", site);
    }
  }

  std::runtime_error error(const std::string& what, Site site) const {
    std::ostringstream text;
    const char* slash = std::strrchr(site.file, '/');
    text << "emulation: " << what << "; " << (slash ? slash + 1 : site.file) << ":" << site.line;
    if (running_) {
      text << ", block " << describe(running_->identity.block) << ", thread " << running_->index;
    }
    return std::runtime_error(text.str());
  }

  std::runtime_error stuck() const {
    std::ostringstream text;
    text << "emulation: divergent barrier: the block can't go on, " << done_ << " of " << count_
         << " threads are done;";
    int listed = 0;
    for (const Thread& t : threads_) {
      if (t.state == State::kDone || ++listed > 4) continue;
      text << " thread " << t.index << " waits at " << t.waiting_for << ", line " << t.site.line
           << ";";
    }
    return std::runtime_error(text.str());
  }

  const std::function<void()>& kernel_;
  const int count_;
  const size_t dynamic_bytes_;
  uint32_t launch_begin_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<Thread*> ready_;
  std::vector<Allocation> allocations_;
  size_t used_ = 0;
  int done_ = 0, at_barrier_ = 0;
  Thread* running_ = nullptr;
  size_t latest_range_ = 0;
  std::exception_ptr failure_;
};

}  // namespace

void configure(uint64_t seed, Order order) { settings = {seed, order}; }

MemoryScope::MemoryScope() {
  if (scopes++ == 0) ranges.clear();
}
MemoryScope::~MemoryScope() {
  if (--scopes == 0) ranges.clear();
}

void allow(const void* begin, size_t bytes, bool writable, const char* name) {
  const char* at = static_cast<const char*>(begin);
  ranges.push_back({at, at + bytes, writable, name, nullptr});
}

const Identity& self() { return current->self(); }
void* shared(Site site, size_t bytes, size_t alignment) {
  return current->shared(site, bytes, alignment);
}
void* dynamic_shared() { return current->dynamic_shared(); }
void access(const void* address, size_t bytes, size_t alignment, bool is_store, Site site) {
  current->access(address, bytes, alignment, is_store, site);
}
void block_barrier(Site site) { current->block_barrier(site); }
const void* warp_exchange(unsigned mask, const void* value, size_t bytes, bool orders_memory,
                          const char* what, Site site) {
  return current->warp_exchange(mask, value, bytes, orders_memory, what, site);
}

void run(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()>& kernel) {
  if (grid.y > 65535 || grid.z > 65535) {
    throw std::runtime_error("emulation: grid " + describe(grid) + " exceeds 65535 in y or z");
  }
  if (dynamic_shared_bytes > kArenaBytes) {
    throw std::runtime_error("emulation: " + std::to_string(dynamic_shared_bytes) +
                             " bytes of dynamic shared memory; at most " +
                             std::to_string(kArenaBytes));
  }
  size_t count = size_t{grid.x} * grid.y * grid.z;
  if (count == 0) return;
  std::mt19937_64 random(settings.seed);
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  if (settings.order == Order::kReversed) std::reverse(order.begin(), order.end());
  if (settings.order == Order::kRandom) std::shuffle(order.begin(), order.end(), random);
  BlockRun run(grid, block, dynamic_shared_bytes, kernel);
  for (size_t i : order) {
    unsigned x = i % grid.x, y = i / grid.x % grid.y, z = i / grid.x / grid.y;
    run.run(dim3(x, y, z), random);
  }
}

}  // namespace longspark::emulation
