// SPDX-License-Identifier: Apache-2.0

// Memory of tensors that shows what a call does around them.
#ifndef FA2_TESTS_SUPPORT_BUFFER_H_
#define FA2_TESTS_SUPPORT_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fa2/types.h"

namespace fa2::test {

// Where buffers lie. At a page's edge, the page beyond is not mapped, and
// reading or writing it ends the process.
enum class Placement { kAnywhere, kEndsAtPage, kBeginsAtPage };

// For all buffers made during its life, on any thread. One at a time.
class PlacementOfBuffers {
 public:
  explicit PlacementOfBuffers(Placement placement);
  ~PlacementOfBuffers();
  PlacementOfBuffers(const PlacementOfBuffers&) = delete;
  PlacementOfBuffers& operator=(const PlacementOfBuffers&) = delete;
};

// Memory with guard bytes at both ends, or at one and an unmapped page at the
// other. Every byte starts as 0xFF, which reads as NaN in each float type: what
// a kernel reads outside of a tensor shows in its results, what it writes there
// is found by ChangedOutside.
class Buffer {
 public:
  // `alignment` in bytes, of data(); at the end of a page it is what `bytes`
  // leaves.
  explicit Buffer(size_t bytes, size_t alignment = 1);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() { return data_; }

  // Remembers the contents, and puts them back.
  void Snapshot();
  void Restore();
  std::vector<uint8_t> Contents() const { return {all_, all_ + all_bytes_}; }
  // Whether a byte differs from the snapshot, other than in elements of these
  // views of this buffer.
  bool ChangedOutside(const std::vector<ConstTensorView>& written) const;

  // At a page's edge: whoever writes a byte from now on ends the process.
  // Elsewhere nothing.
  void ForbidWriting();

 private:
  void PlaceAnywhere(size_t bytes, size_t alignment);
  void PlaceAtEdge(size_t bytes, bool end);

  std::vector<uint8_t> heap_;  // where it lies anywhere
  void* mapping_ = nullptr;    // where it lies at an edge
  size_t mapping_bytes_ = 0;   // the unmapped page among them
  uint8_t* all_ = nullptr;     // guard bytes and data
  size_t all_bytes_ = 0;
  uint8_t* data_ = nullptr;
  std::vector<uint8_t> snapshot_;
};

}  // namespace fa2::test

#endif  // FA2_TESTS_SUPPORT_BUFFER_H_
