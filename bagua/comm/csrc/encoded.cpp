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
  EncodedRows(Mesh* mesh, const Encoded& e)
      : e_(e), k_(e.kernels), mean_k_(e.mean_kernels), rank_(mesh->rank), size_(mesh->size) {}
  ~EncodedRows() { free(memory_); }

  bool allocate() {
    const int64_t longest = most(k_.block, mean_k_.block), block = least(most(longest, kLerpScratch), most(e_.c, 1));
    // The longest range that is put together: a block, or what follows the last whole block of the payload.
    const int64_t last_row = e_.n / e_.c * e_.c;
    const int64_t body = last_row + least(whole(k_, e_.n - last_row), whole(mean_k_, e_.n - last_row));
    tail_ = least(e_.c, most(longest, least(last_row + e_.c, size_ * e_.c) - body));
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
    const int64_t body = stop == last ? last : first + whole(k_, stop - first);
    for (int64_t a = first, b; a < body; a = b) {
      b = range_end(k_, a, first, body);
      const Piece* const p = piece_at(a);
      if (b <= p->hi) {
        encode(p->x + (a - p->lo), p->other ? p->other + (a - p->lo) : nullptr, residual_at(a), a - first, b - a, out);
      } else {
        encode_put_together(a, b, b - a, a - first, out);
      }
    }
    if (body < last) encode_put_together(body, stop, last - body, body - first, out);
    pad(out, e_.code_end, e_.row_bytes);
  }

  void combine() {
    uint8_t* const out = e_.means + rank_ * e_.mean_bytes;
    const int64_t codes = code_at(k_, 0), mean_codes = code_at(mean_k_, 0);
    if (!e_.mean_scratch) {
      as<DecodeMeanEncode>(k_.decode_mean_encode)(e_.peers, e_.peers + codes, e_.row_bytes, size_, e_.c, k_.block,
                                                  e_.weight, e_.chunk_residual, scratch_, out, out + codes);
    } else {
      as<DecodeMean>(k_.decode_mean)(e_.peers, e_.peers + codes, e_.row_bytes, size_, e_.c, k_.block, e_.weight,
                                     e_.mean_scratch);
      if (e_.chunk_residual)
        as<EncodeFeedback>(mean_k_.encode_feedback)(e_.mean_scratch, 0, e_.chunk_residual, 0, 1, e_.c, mean_k_.block,
                                                    out, out + mean_codes, 0);
      else
        as<Encode>(mean_k_.encode)(e_.mean_scratch, 0, 1, e_.c, mean_k_.block, out, out + mean_codes, 0);
    }
    pad(out, e_.mean_code_end, e_.mean_bytes);
  }

  void read(int64_t row) {
    // Versions of a row that was swapped lie one after the other.
    const uint8_t* const wire = e_.swapped ? (row == rank_ ? e_.peers : e_.rows) : e_.means + row * e_.mean_bytes;
    const int64_t first = row * e_.c, last = first + e_.c;
    const int64_t stop = most(least(last, e_.n), first);
    const int64_t body = stop == last ? last : first + whole(mean_k_, stop - first);
    if (!mixes()) {
      if (first < body) decode(wire, 0, body - first, e_.x + first);
    } else {
      for (int64_t a = first, b; a < body; a = b) {
        b = range_end(mean_k_, a, first, body);
        const Piece* const p = piece_at(a);
        const bool in_place = b <= p->hi;
        if (!in_place) gather_other(a, b);
        decode_mixed(wire, a - first, b - a, in_place ? p->other + (a - p->lo) : other_, e_.x + a);
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
  int64_t head_at(const Kernels& k, int64_t i) const { return (i + k.block - 1) / k.block * k.header_bytes; }
  int64_t code_at(const Kernels& k, int64_t i) const { return head_at(k, e_.c) + i * k.code_bits / 8; }
  // Of m elements, those in whole blocks.
  static int64_t whole(const Kernels& k, int64_t m) { return m / k.block * k.block; }

  static void pad(uint8_t* row, int64_t end, int64_t bytes) {
    if (end < bytes) memset(row + end, 0, static_cast<size_t>(bytes - end));
  }

  bool mixes() const { return e_.num_pieces && e_.pieces[0].other; }
  float* residual_at(int64_t i) const { return e_.residual ? e_.residual + i : nullptr; }

  // Pieces follow one another, and so do most questions.
  const Piece* piece_at(int64_t i) {
    if (i < e_.pieces[at_].lo) at_ = 0;
    while (i >= e_.pieces[at_].hi) ++at_;
    return e_.pieces + at_;
  }

  // Whole blocks that lie in one place; else one block.
  int64_t range_end(const Kernels& k, int64_t a, int64_t first, int64_t body) {
    const int64_t end = piece_at(a)->hi;
    if (end >= body) return body;
    const int64_t last = whole(k, end - first) + first;
    return last > a ? last : least(a + k.block, body);
  }

  void encode(const float* x, const float* other, float* residual, int64_t start, int64_t m, uint8_t* wire) {
    uint8_t *const head = wire + head_at(k_, start), *const codes = wire + code_at(k_, start);
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
    const uint8_t *const head = wire + head_at(mean_k_, start), *const codes = wire + code_at(mean_k_, start);
    if (e_.swapped)
      as<DecodeMean>(mean_k_.decode_mean)(head, codes, e_.row_bytes, size_, m, mean_k_.block, e_.weight, out);
    else
      as<Decode>(mean_k_.decode)(head, codes, 0, 1, m, mean_k_.block, out, 0, mean_k_.stream_from);
  }

  void decode_mixed(const uint8_t* wire, int64_t start, int64_t m, const float* other, float* out) {
    const uint8_t *const head = wire + head_at(mean_k_, start), *const codes = wire + code_at(mean_k_, start);
    const int64_t away = m * static_cast<int64_t>(sizeof(float)) >= mean_k_.stream_from;
    if (e_.swapped)
      as<DecodeMeanLerp>(mean_k_.decode_mean_lerp)(head, codes, e_.row_bytes, size_, m, mean_k_.block, e_.weight, other,
                                                   e_.leave, scratch_, out);
    else
      as<DecodeLerp>(mean_k_.decode_lerp)(head, codes, m, mean_k_.block, other, e_.leave, scratch_, out, away);
  }

  const Encoded e_;
  const Kernels k_, mean_k_;
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
  uint8_t** const at = static_cast<uint8_t**>(malloc(3 * size * sizeof *at));
  int64_t* const bytes = static_cast<int64_t*>(malloc(2 * size * sizeof *bytes));
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
      at[2 * size + r] = encoded->means + static_cast<int64_t>(r) * encoded->mean_bytes;
      bytes[r] = encoded->row_bytes;
      bytes[size + r] = encoded->mean_bytes;
    }
    const Rows where = {at, at + size, at + 2 * size, bytes, bytes + size, encoded->swapped};
    const Steps steps = {write_step, combine_step, read_step, &rows};
    result = bagua_mesh_exchange(mesh, &where, &steps, limits, problem);
  }
  free(at);
  free(bytes);
  return result;
}
