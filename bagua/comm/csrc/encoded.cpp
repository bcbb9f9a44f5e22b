// The steps of an exchange of encoded rows: what bagua/exchanges/rows.py does, with the same kernels and the same bits.
//
// Kernels come as addresses, so that there is one copy of them. Rows are encoded from where their elements lie. A block
// of which the elements lie in several places, or that sticks out of the payload, is put together in scratch.
#include <stdlib.h>
#include <string.h>

#include "mesh.h"
// The kernels' types.
#define BAGUA_ISA baseline
#include "../../codecs/csrc/abi.h"

namespace {

using Encode = decltype(&bagua_int4_encode_baseline);
using EncodeFeedback = decltype(&bagua_int4_encode_feedback_baseline);
using EncodeLerp = decltype(&bagua_int4_encode_lerp_baseline);
using Decode = decltype(&bagua_int4_decode_baseline);
using DecodeLerp = decltype(&bagua_int4_decode_lerp_baseline);
using DecodeMean = decltype(&bagua_int4_decode_mean_baseline);
using DecodeMeanEncode = decltype(&bagua_int4_decode_mean_encode_baseline);
using DecodeMeanLerp = decltype(&bagua_int4_decode_mean_lerp_baseline);

constexpr int64_t kLerpScratch = 2048;  // as in bagua/codecs/csrc/blocks.h

template <typename F>
F as(const void* address) {
  return reinterpret_cast<F>(const_cast<void*>(address));
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

class EncodedRows {
 public:
  EncodedRows(Mesh* mesh, const Encoded& e) : e_(e), k_(e.kernels), rank_(mesh->rank), size_(mesh->size) {}
  ~EncodedRows() { free(memory_); }

  bool allocate() {
    const int64_t block = least(most(k_.block, kLerpScratch), most(e_.c, 1));
    // The longest range that is put together: a block, or what follows the last whole block of the payload.
    const int64_t last_row = e_.n / e_.c * e_.c;
    const int64_t body = last_row + (e_.n - last_row) / k_.block * k_.block;
    tail_ = least(e_.c, most(k_.block, least(last_row + e_.c, size_ * e_.c) - body));
    if (last_row + e_.c < size_ * e_.c) tail_ = e_.c;  // rows that hold no element
    memory_ = static_cast<float*>(malloc(static_cast<size_t>(block + 4 * tail_) * sizeof(float)));
    if (!memory_) return false;
    scratch_ = memory_;
    x_ = scratch_ + block;
    other_ = x_ + tail_;
    lost_ = other_ + tail_;
    out_ = lost_ + tail_;
    return true;
  }

  void write(int64_t row, uint8_t* out) {
    const int64_t first = row * e_.c, last = first + e_.c;
    const int64_t stop = most(least(last, e_.n), first);
    const int64_t body = stop == last ? last : first + (stop - first) / k_.block * k_.block;
    for (int64_t a = first, b; a < body; a = b) {
      b = range_end(a, first, body);
      const Piece* const p = piece_at(a);
      if (b <= p->hi) {
        encode(p->x + (a - p->lo), p->other ? p->other + (a - p->lo) : nullptr, residual_at(a), a - first, b - a, out);
      } else {
        encode_put_together(a, b, b - a, a - first, out);
      }
    }
    if (body < last) encode_put_together(body, stop, last - body, body - first, out);
    if (e_.code_end < e_.row_bytes) memset(out + e_.code_end, 0, static_cast<size_t>(e_.row_bytes - e_.code_end));
  }

  void combine() {
    uint8_t* const out = e_.rows + rank_ * e_.row_bytes;
    const int64_t codes = code_at(0);
    as<DecodeMeanEncode>(k_.decode_mean_encode)(e_.peers, e_.peers + codes, e_.row_bytes, size_, e_.c, k_.block,
                                                e_.weight, e_.chunk_residual, scratch_, out, out + codes);
    if (e_.code_end < e_.row_bytes) memset(out + e_.code_end, 0, static_cast<size_t>(e_.row_bytes - e_.code_end));
  }

  void read(int64_t row) {
    // Versions of a row that was swapped lie one after the other.
    const uint8_t* const wire = e_.swapped ? (row == rank_ ? e_.peers : e_.rows) : e_.rows + row * e_.row_bytes;
    const int64_t first = row * e_.c, last = first + e_.c;
    const int64_t stop = most(least(last, e_.n), first);
    const int64_t body = stop == last ? last : first + (stop - first) / k_.block * k_.block;
    if (!mixes()) {
      if (first < body) decode(wire, 0, body - first, e_.x + first);
    } else {
      for (int64_t a = first, b; a < body; a = b) {
        b = range_end(a, first, body);
        const Piece* const p = piece_at(a);
        const bool whole = b <= p->hi;
        if (!whole) gather_other(a, b);
        decode_mixed(wire, a - first, b - a, whole ? p->other + (a - p->lo) : other_, e_.x + a);
      }
    }
    if (body >= stop) return;
    if (mixes()) {
      gather_other(body, stop);
      memset(other_ + (stop - body), 0, static_cast<size_t>(last - stop) * sizeof(float));
      decode_mixed(wire, body - first, last - body, other_, out_);
    } else {
      decode(wire, body - first, last - body, out_);
    }
    memcpy(e_.x + body, out_, static_cast<size_t>(stop - body) * sizeof(float));
  }

 private:
  // Of a row, for the block that begins at element i.
  int64_t head_at(int64_t i) const { return (i + k_.block - 1) / k_.block * k_.header_bytes; }
  int64_t code_at(int64_t i) const { return head_at(e_.c) + i * k_.code_bits / 8; }

  bool mixes() const { return e_.num_pieces && e_.pieces[0].other; }
  float* residual_at(int64_t i) const { return e_.residual ? e_.residual + i : nullptr; }

  // Pieces follow one another, and so do most questions.
  const Piece* piece_at(int64_t i) {
    if (i < e_.pieces[at_].lo) at_ = 0;
    while (i >= e_.pieces[at_].hi) ++at_;
    return e_.pieces + at_;
  }

  // Whole blocks that lie in one place; else one block.
  int64_t range_end(int64_t a, int64_t first, int64_t body) {
    const int64_t end = piece_at(a)->hi;
    if (end >= body) return body;
    const int64_t whole = (end - first) / k_.block * k_.block + first;
    return whole > a ? whole : least(a + k_.block, body);
  }

  void encode(const float* x, const float* other, float* residual, int64_t start, int64_t m, uint8_t* wire) {
    uint8_t *const head = wire + head_at(start), *const codes = wire + code_at(start);
    if (other)
      as<EncodeLerp>(k_.encode_lerp)(x, other, e_.enter, residual, m, k_.block, scratch_, head, codes);
    else if (residual)
      as<EncodeFeedback>(k_.encode_feedback)(x, 0, residual, 0, 1, m, k_.block, head, codes, 0);
    else
      as<Encode>(k_.encode)(x, 0, 1, m, k_.block, head, codes, 0);
  }

  // Elements a to b, and zeros up to m of them.
  void encode_put_together(int64_t a, int64_t b, int64_t m, int64_t start, uint8_t* wire) {
    for (int64_t i = a, next; i < b; i = next) {
      const Piece* const p = piece_at(i);
      next = least(p->hi, b);
      memcpy(x_ + (i - a), p->x + (i - p->lo), static_cast<size_t>(next - i) * sizeof(float));
    }
    const size_t used = static_cast<size_t>(b - a) * sizeof(float), rest = static_cast<size_t>(m) * sizeof(float) - used;
    memset(x_ + (b - a), 0, rest);
    if (mixes()) {
      gather_other(a, b);
      memset(other_ + (b - a), 0, rest);
    }
    if (e_.residual) {
      memcpy(lost_, e_.residual + a, used);
      memset(lost_ + (b - a), 0, rest);
    }
    encode(x_, mixes() ? other_ : nullptr, e_.residual ? lost_ : nullptr, start, m, wire);
    if (e_.residual) memcpy(e_.residual + a, lost_, used);
  }

  void gather_other(int64_t a, int64_t b) {
    for (int64_t i = a, next; i < b; i = next) {
      const Piece* const p = piece_at(i);
      next = least(p->hi, b);
      memcpy(other_ + (i - a), p->other + (i - p->lo), static_cast<size_t>(next - i) * sizeof(float));
    }
  }

  void decode(const uint8_t* wire, int64_t start, int64_t m, float* out) {
    const uint8_t *const head = wire + head_at(start), *const codes = wire + code_at(start);
    if (e_.swapped)
      as<DecodeMean>(k_.decode_mean)(head, codes, e_.row_bytes, size_, m, k_.block, e_.weight, out);
    else
      as<Decode>(k_.decode)(head, codes, 0, 1, m, k_.block, out, 0, k_.stream_from);
  }

  void decode_mixed(const uint8_t* wire, int64_t start, int64_t m, const float* other, float* out) {
    const uint8_t *const head = wire + head_at(start), *const codes = wire + code_at(start);
    const int64_t away = m * static_cast<int64_t>(sizeof(float)) >= k_.stream_from;
    if (e_.swapped)
      as<DecodeMeanLerp>(k_.decode_mean_lerp)(head, codes, e_.row_bytes, size_, m, k_.block, e_.weight, other, e_.leave,
                                              scratch_, out);
    else
      as<DecodeLerp>(k_.decode_lerp)(head, codes, m, k_.block, other, e_.leave, scratch_, out, away);
  }

  const Encoded e_;
  const Kernels k_;
  const int64_t rank_, size_;
  int64_t at_ = 0, tail_ = 0;
  float *memory_ = nullptr, *scratch_ = nullptr, *x_ = nullptr, *other_ = nullptr, *lost_ = nullptr, *out_ = nullptr;
};

int32_t write_step(void* self, int64_t row, uint8_t* out) {
  static_cast<EncodedRows*>(self)->write(row, out);
  return 0;
}

int32_t combine_step(void* self) {
  static_cast<EncodedRows*>(self)->combine();
  return 0;
}

int32_t read_step(void* self, int64_t row) {
  static_cast<EncodedRows*>(self)->read(row);
  return 0;
}

}  // namespace

int32_t bagua_mesh_exchange_encoded(Mesh* mesh, const Encoded* encoded, const Limits* limits, Problem* problem) {
  const size_t size = static_cast<size_t>(mesh->size);
  EncodedRows rows(mesh, *encoded);
  uint8_t** const at = static_cast<uint8_t**>(malloc(2 * size * sizeof *at));
  int64_t* const bytes = static_cast<int64_t*>(malloc(size * sizeof *bytes));
  int32_t result = -1;
  problem->text[0] = 0;
  problem->failed_step = 0;
  if (!at || !bytes || !rows.allocate()) {
    tell(problem, "no memory for the scratch of an exchange");
    bagua_mesh_abort(mesh);
  } else {
    for (size_t r = 0; r < size; ++r) {
      at[r] = encoded->rows + static_cast<int64_t>(r) * encoded->row_bytes;
      at[size + r] = encoded->peers + static_cast<int64_t>(r) * encoded->row_bytes;
      bytes[r] = encoded->row_bytes;
    }
    const Rows where = {at, at + size, bytes, encoded->swapped};
    const Steps steps = {write_step, combine_step, read_step, &rows};
    result = bagua_mesh_exchange(mesh, &where, &steps, limits, problem);
  }
  free(at);
  free(bytes);
  return result;
}
