// SPDX-License-Identifier: Apache-2.0
#include "src/verify/cases/shards.h"

#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "src/verify/cases/error.h"

namespace fa2::verify {
namespace {

struct Named {
  const char* name;
  ShardBy by;
};

constexpr Named kNames[] = {{"sequence", ShardBy::kSequence},
                            {"zigzag", ShardBy::kZigzag},
                            {"striped", ShardBy::kStriped},
                            {"heads", ShardBy::kHeads},
                            {"batch", ShardBy::kBatch}};

bool CutsRows(ShardBy by) {
  return by != ShardBy::kHeads && by != ShardBy::kBatch;
}

// Logical dimensions of each of the array's: b, h, n, and others as dots.
std::string DimensionsOf(const std::string& name, Layout layout, size_t rank) {
  std::string all;
  if (name == "sinks" || name == "dsinks") {
    all = "...h";
  } else if (name == "alibi_slopes" || name == "dalibi_slopes") {
    all = "..bh";
  } else if (name == "bias" || name == "dbias" || name == "keep") {
    all = "bhn.";
  } else if (name == "lse" || name == "dlse") {
    all = rank > 3 ? "bhn." : ".bhn";
  } else if (layout == Layout::kBhsd) {
    all = "bhn.";
  } else if (layout == Layout::kBshd) {
    all = "bnh.";
  } else {
    all = ".nh.";
  }
  return rank <= 4 ? all.substr(4 - rank) : "";
}

// The array's dimension that is cut; none where it has no such one.
std::optional<size_t> CutDimension(const std::string& name, const Case& c,
                                   ShardBy by) {
  std::string letter = CutsRows(by) ? "n" : by == ShardBy::kHeads ? "h" : "b";
  // Sequences of a packed batch lie one after another.
  if (by == ShardBy::kBatch && c.options.layout == Layout::kThd) letter = "n";
  const size_t at =
      DimensionsOf(name, c.options.layout, c.Find(name)->shape.size())
          .find(letter);
  if (at == std::string::npos) return std::nullopt;
  return at;
}

class Joiner {
 public:
  Joiner(const std::vector<Case>& ranks, ShardBy by) : ranks_(ranks), by_(by) {}

  Case Join() {
    joined_ = ranks_.front();
    joined_.shards = {by_, static_cast<int64_t>(ranks_.size()), {}};
    for (size_t r = 1; r < ranks_.size(); ++r) {
      if (WriteOptions(ranks_[r].options) != WriteOptions(joined_.options)) {
        throw Error(At(r) + "its options are " +
                    WriteOptions(ranks_[r].options) + ", those of rank 0 are " +
                    WriteOptions(joined_.options));
      }
      if (ranks_[r].tensors.size() != joined_.tensors.size()) {
        throw Error(
            At(r) + "it has " + std::to_string(ranks_[r].tensors.size()) +
            " tensors, rank 0 has " + std::to_string(joined_.tensors.size()));
      }
    }
    for (auto& [name, array] : joined_.tensors) array = JoinTensor(name);
    CheckPackedTotal();
    return std::move(joined_);
  }

 private:
  std::string At(size_t rank) const {
    const std::string& name = ranks_.front().name;
    return (name.empty() ? "" : name + ": ") + "rank " + std::to_string(rank) +
           ": ";
  }

  const Array& Piece(size_t rank, const std::string& name) const {
    const Array* array = ranks_[rank].Find(name);
    if (array == nullptr) {
      throw Error(At(rank) + "tensor " + name + " is missing");
    }
    const Array& first = *ranks_.front().Find(name);
    if (array->dtype != first.dtype ||
        array->shape.size() != first.shape.size()) {
      throw Error(At(rank) + "tensor " + name +
                  " has another dtype or number of dimensions than on rank 0");
    }
    return *array;
  }

  Array JoinTensor(const std::string& name) {
    if (name.rfind("cu_seqlens", 0) == 0) return JoinPrefixSums(name);
    const auto dimension = CutDimension(name, ranks_.front(), by_);
    if (!dimension || Broadcasts(name, *dimension)) return Same(name);
    return Concatenate(name, *dimension);
  }

  // Whether a dimension that may be 1 of any number is so. A rank that has one
  // row or head in all says it by having the same as the others.
  bool Broadcasts(const std::string& name, size_t dimension) const {
    if (name != "bias" && name != "dbias" && name != "keep") return false;
    const Array& first = *ranks_.front().Find(name);
    if (first.shape[dimension] != 1) return false;
    for (const char* rows : {"q", "out", "dq"}) {
      if (ranks_.front().Find(rows) == nullptr) continue;
      const auto cut = CutDimension(rows, ranks_.front(), by_);
      if (cut && ranks_.front().Find(rows)->shape[*cut] == 1) break;
      return true;
    }
    for (size_t r = 1; r < ranks_.size(); ++r) {
      if (!Equal(Piece(r, name), first)) return false;
    }
    return true;
  }

  static bool Equal(const Array& a, const Array& b) {
    return a.shape == b.shape && std::memcmp(a.data, b.data,
                                             static_cast<size_t>(a.elements()) *
                                                 SizeOf(a.dtype)) == 0;
  }

  // What every rank has whole.
  Array Same(const std::string& name) const {
    const Array& first = *ranks_.front().Find(name);
    for (size_t r = 1; r < ranks_.size(); ++r) {
      if (!Equal(Piece(r, name), first)) {
        throw Error(At(r) + "tensor " + name +
                    " differs from rank 0's, and it has no dimension that is "
                    "cut: it must be the same, and a gradient reduced");
      }
    }
    return first;
  }

  Array JoinPrefixSums(const std::string& name) const {
    // Cut by rows: the packed total is, and each rank has the whole's sums.
    if (by_ != ShardBy::kBatch) return Same(name);
    auto sums = std::make_shared<std::vector<int64_t>>(1, 0);
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const Array& piece = Piece(r, name);
      const int64_t begin = sums->back();
      for (int64_t i = 1; i < piece.elements(); ++i) {
        sums->push_back(begin +
                        (piece.dtype == DType::kI32
                             ? static_cast<const int32_t*>(piece.data)[i]
                             : static_cast<const int64_t*>(piece.data)[i]));
      }
    }
    Array array;
    array.dtype = DType::kI64;
    array.shape = {static_cast<int64_t>(sums->size())};
    array.data = sums->data();
    array.owner = sums;
    return array;
  }

  // The rank and its own index of each index of the joined dimension.
  std::vector<std::pair<size_t, int64_t>> Sources(
      const std::string& name, const std::vector<int64_t>& sizes) {
    int64_t total = 0;
    for (const int64_t size : sizes) total += size;
    joined_.shards.counts[total] = sizes;
    std::vector<std::pair<size_t, int64_t>> sources;
    std::vector<int64_t> next(sizes.size(), 0);
    for (int64_t at = 0; at < total; ++at) {
      const auto rank = static_cast<size_t>(joined_.shards.RankOf(at, total));
      sources.emplace_back(rank, next[rank]++);
    }
    for (size_t r = 0; r < sizes.size(); ++r) {
      if (next[r] == sizes[r]) continue;
      throw Error(At(r) + "tensor " + name + " has " +
                  std::to_string(sizes[r]) + " rows of " +
                  std::to_string(total) + ", it must have " +
                  std::to_string(next[r]));
    }
    return sources;
  }

  Array Concatenate(const std::string& name, size_t dimension) {
    const Array& first = *ranks_.front().Find(name);
    std::vector<const Array*> pieces;
    std::vector<int64_t> sizes;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const Array& piece = Piece(r, name);
      std::vector<int64_t> shape = piece.shape;
      shape[dimension] = first.shape[dimension];
      if (shape != first.shape) {
        throw Error(At(r) + "tensor " + name +
                    " has another shape than on rank 0");
      }
      pieces.push_back(&piece);
      sizes.push_back(piece.shape[dimension]);
    }
    const auto sources = Sources(name, sizes);
    size_t outer = 1, inner = SizeOf(first.dtype);
    for (size_t d = 0; d < first.shape.size(); ++d) {
      if (d < dimension) outer *= static_cast<size_t>(first.shape[d]);
      if (d > dimension) inner *= static_cast<size_t>(first.shape[d]);
    }
    Array joined = first;
    joined.shape[dimension] = static_cast<int64_t>(sources.size());
    auto bytes =
        std::make_shared<std::vector<uint8_t>>(outer * sources.size() * inner);
    uint8_t* to = bytes->data();
    for (size_t o = 0; o < outer; ++o) {
      for (const auto& [rank, index] : sources) {
        const size_t row =
            o * static_cast<size_t>(sizes[rank]) + static_cast<size_t>(index);
        std::memcpy(
            to, static_cast<const uint8_t*>(pieces[rank]->data) + row * inner,
            inner);
        to += inner;
      }
    }
    joined.data = bytes->data();
    joined.owner = bytes;
    return joined;
  }

  // Prefix sums of the whole end where the joined rows do.
  void CheckPackedTotal() const {
    if (!CutsRows(by_)) return;
    for (const auto& [sums_name, rows_of] :
         {std::pair("cu_seqlens_q", "q"), std::pair("cu_seqlens_k", "k")}) {
      const Array* sums = joined_.Find(sums_name);
      const Array* rows = joined_.Find(rows_of);
      if (sums == nullptr || rows == nullptr || sums->elements() == 0) continue;
      const auto last = static_cast<size_t>(sums->elements() - 1);
      const int64_t total = sums->dtype == DType::kI32
                                ? static_cast<const int32_t*>(sums->data)[last]
                                : static_cast<const int64_t*>(sums->data)[last];
      if (rows->shape.empty() || total == rows->shape.front()) continue;
      throw Error(At(0) + "tensor " + sums_name + " ends with " +
                  std::to_string(total) + ", all ranks' " + rows_of + " have " +
                  std::to_string(rows->shape.front()) +
                  " rows: it must be that of the whole batch on every rank");
    }
  }

  const std::vector<Case>& ranks_;
  ShardBy by_;
  Case joined_;
};

}  // namespace

int64_t Shards::RankOf(int64_t at, int64_t size) const {
  switch (by) {
    case ShardBy::kStriped:
      return at % ranks;
    case ShardBy::kZigzag: {
      // The first `longer` runs have one row more.
      const int64_t length = size / (2 * ranks), longer = size % (2 * ranks);
      const int64_t head = longer * (length + 1);
      const int64_t run =
          at < head ? at / (length + 1) : longer + (at - head) / length;
      return run < ranks ? run : 2 * ranks - 1 - run;
    }
    default: {
      const auto known = counts.find(size);
      if (known == counts.end()) return at * ranks / size;
      int64_t rank = 0, end = 0;
      for (const int64_t count : known->second) {
        end += count;
        if (at < end) break;
        ++rank;
      }
      return rank;
    }
  }
}

ShardBy ShardByNamed(const std::string& name) {
  for (const Named& known : kNames) {
    if (name == known.name) return known.by;
  }
  throw Error("--shard-by is " + name +
              ", it must be sequence, zigzag, striped, heads or batch");
}

Case JoinShards(const std::vector<Case>& ranks, ShardBy by) {
  return Joiner(ranks, by).Join();
}

}  // namespace fa2::verify
