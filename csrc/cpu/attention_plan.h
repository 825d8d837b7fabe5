// A step's attention, cut into pieces of work.
#pragma once

#include <algorithm>
#include <vector>

#include "pages.h"

namespace anyrig {

constexpr int SPLIT = 512;  // positions of one split
constexpr int QUERY_ROWS = 32;  // rows of one work item, at most (more only for more heads per KV head)
constexpr int MOST_ROWS_OF_ITEM = 128;  // so many query heads may share a KV head

// One sequence's part of the step: rows first .. first + length of the flat batch are its positions start ...
struct Chunk {
  int first, length, start;
  const int32_t* table;
};

// A piece of work: tokens t0 .. t1 of a chunk against splits s0 .. s1, for one KV head (chosen when it is run).
struct WorkItem {
  int chunk, t0, t1, s0, s1;
  int partial;  // first slot of its partial results, -1: it sees all its splits itself
};

// The step's work, planned once and shared by all layers with the same number of heads per KV head.
struct AttentionPlan {
  std::vector<Chunk> chunks;
  std::vector<WorkItem> items;
  std::vector<WorkItem> merges;  // items whose splits were dealt out, to be merged when all are done
  int partials = 0;              // slots of partial results (per KV head)
  int rows = 0;                  // most rows of an item

  // `splits`: the splits of a long sequence may be dealt to several threads, which leaves partial results to merge.
  void build(int group, int kv_heads, int threads, bool splits) {
    items.clear(), merges.clear(), partials = 0, rows = 0;
    const int tokens = std::max(1, QUERY_ROWS / group);
    for (int c = 0; c < int(chunks.size()); ++c)
      for (int t = 0; t < chunks[c].length; t += tokens) {
        const int end = std::min(t + tokens, chunks[c].length);
        items.push_back({c, t, end, 0, ceil_div(chunks[c].start + end, SPLIT), -1});
        rows = std::max(rows, (end - t) * group);
      }
    if (splits && long(items.size()) * kv_heads < 2L * threads) deal_splits();
    // Long ones first: the threads finish together.
    std::stable_sort(items.begin(), items.end(), [](auto& a, auto& b) { return work(a) > work(b); });
  }

 private:
  static long work(const WorkItem& i) { return long(i.t1 - i.t0) * (i.s1 - i.s0); }

  void deal_splits() {
    std::vector<WorkItem> dealt;
    for (WorkItem item : items) {
      if (item.s1 <= 1 || item.t1 - item.t0 > 1) {  // rows of prompts are many: they keep the threads busy as they are
        dealt.push_back(item);
        continue;
      }
      item.partial = partials;
      merges.push_back(item);
      for (int s = 0; s < item.s1; ++s) dealt.push_back({item.chunk, item.t0, item.t1, s, s + 1, partials + s});
      partials += item.s1;
    }
    items = std::move(dealt);
  }
};

}  // namespace anyrig
