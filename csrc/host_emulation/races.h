// Who touched which bytes last, and whether a new access is ordered after that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace longspark::emulation {

constexpr int kWarpSize = 32;

// When and by whom an access is made. Counters only grow, so that records never need clearing.
struct Moment {
  int thread = -1;              // in its block
  uint32_t block_run = 0;       // number of the block, over all launches
  uint32_t block_barriers = 0;  // passed, over all blocks
  uint32_t warp_barriers = 0;   // passed by the thread's warp
};

// Records for a stretch of memory. Two accesses race if one of them stores and neither a barrier of
// the threads' block or warp nor the launch's end comes between.
class RaceRecords {
 public:
  explicit RaceRecords(size_t bytes) : cells_((bytes + kCell - 1) / kCell) {}

  // Notes an access; returns what is wrong with it, or nothing. `launch_begin` is the number of the
  // launch's first block.
  std::string access(size_t begin, size_t bytes, bool is_store, const Moment& now,
                     uint32_t launch_begin) {
    for (size_t i = begin / kCell; i < (begin + bytes + kCell - 1) / kCell; ++i) {
      Cell& cell = cells_[i];
      if (is_unordered(cell.store, now, launch_begin)) return race("stored to", cell.store, now);
      bool same_run = cell.load.block_run == now.block_run;
      bool same_interval = same_run && cell.load.block_barriers == now.block_barriers;
      bool same_warp = cell.load.thread / kWarpSize == now.thread / kWarpSize;
      bool same_warp_interval =
          same_interval && same_warp && cell.load.warp_barriers == now.warp_barriers;
      bool same_launch = cell.load.thread >= 0 && cell.load.block_run >= launch_begin;
      if (is_store) {
        // The latest load stands for all others, but for these three groups.
        if (is_unordered(cell.load, now, launch_begin) ||
            (same_launch && cell.several_blocks_loaded) ||
            (same_interval && cell.several_warps_loaded) ||
            (same_warp_interval && cell.several_lanes_loaded)) {
          return race("loaded", cell.load, now);
        }
        cell.store = now;
      } else {
        bool other_thread = cell.load.thread != now.thread;
        cell.several_blocks_loaded = same_launch && (cell.several_blocks_loaded || !same_run);
        cell.several_warps_loaded = same_interval && (cell.several_warps_loaded || !same_warp);
        cell.several_lanes_loaded =
            same_warp_interval && (cell.several_lanes_loaded || other_thread);
        cell.load = now;
      }
    }
    return "";
  }

  // Whether all these bytes were stored to by this block.
  bool was_stored(size_t begin, size_t bytes, uint32_t block_run) const {
    for (size_t i = begin / kCell; i < (begin + bytes + kCell - 1) / kCell; ++i) {
      if (cells_[i].store.thread < 0 || cells_[i].store.block_run != block_run) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kCell = 2;  // bytes: the smallest element that kernels store

  struct Cell {
    Moment store, load;                  // the latest of each
    bool several_blocks_loaded = false;  // in this launch
    bool several_warps_loaded = false;   // since the last block barrier
    bool several_lanes_loaded = false;   // of one warp, since its last barrier
  };

  static bool is_unordered(const Moment& then, const Moment& now, uint32_t launch_begin) {
    if (then.thread < 0) return false;
    if (then.block_run != now.block_run) return then.block_run >= launch_begin;
    if (then.thread == now.thread || then.block_barriers != now.block_barriers) return false;
    bool same_warp = then.thread / kWarpSize == now.thread / kWarpSize;
    return !same_warp || then.warp_barriers == now.warp_barriers;
  }

  static std::string race(const char* did, const Moment& then, const Moment& now) {
    std::string who = then.block_run != now.block_run
                          ? "another block"
                          : "another thread (" + std::to_string(then.thread) + ")";
    return "race: " + who + " " + did + " this and no barrier came between";
  }

  std::vector<Cell> cells_;
};

}  // namespace longspark::emulation
