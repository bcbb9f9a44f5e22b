// C ABI of the native transport: exchanges between ranks, over sockets that are connected already.
//
// A mesh is used by one thread at a time; abort may come from any other. No function throws or needs an interpreter.
#pragma once

#include <stdint.h>

#define BAGUA_MESH_ABI 6
#define BAGUA_API extern "C" __attribute__((visibility("default")))

struct Mesh;
struct Relay;

// What an exchange does between transfers. A result that is not 0 ends it.
struct Steps {
  int32_t (*write)(void* self, int64_t row, uint8_t* out);  // what goes to rank `row`
  int32_t (*combine)(void* self);                           // of all that has come for this rank, makes its own row
  int32_t (*read)(void* self, int64_t row);                 // a row that is final
  void* self;
};

// Where rows are. Row r of `rows` goes to rank r, which makes row r of `means` of what has come for it and sends that to
// all. Row r of `peers` becomes what rank r sent to this rank, and is as long as this rank's own row of `rows`. `means`
// may be `rows`: a mean comes after what lies there has gone. A row that is empty is so in both.
//
// Two ranks may exchange both rows as they are (`swapped`), in as many bytes. Then `peers` ends as both ranks' versions
// of this rank's row, by rank, and `rows`, which are `means`, as those of the other rank's. Nothing is combined: a row is
// read once both versions are there. All rows are of one length.
struct Rows {
  uint8_t* const* rows;
  uint8_t* const* peers;
  uint8_t* const* means;
  const int64_t* bytes;
  const int64_t* mean_bytes;
  int32_t swapped;
};

struct Limits {
  uint32_t bucket;     // travels in each frame, and must be the same at both ends
  int64_t timeout_ms;  // without a byte from, or room at, the ranks that are waited for
};

struct Problem {
  char text[240];
  int32_t failed_step;  // not 0: a step's result
};

// A run of the payload that lies in one place, and the tensor to mix in, or null.
struct Piece {
  int64_t lo, hi;
  const float* x;
  const float* other;
};

// The kernels of a codec (bagua/codecs/csrc/abi.h) and their layout; a lerp without kernels is null.
struct Kernels {
  const void *encode, *encode_feedback, *encode_lerp, *decode, *decode_lerp, *decode_mean, *decode_mean_encode;
  const void* decode_mean_lerp;
  int64_t header_bytes, code_bits, block;
  int64_t stream_from;  // bytes of a range from which it is written past the caches
};

// Mean or sum with encoded rows: the steps of an exchange without an interpreter. fp32 throughout.
//
// `means` are encoded with `mean_kernels`. They may be `rows` with the same kernels; else there is `mean_scratch`.
struct Encoded {
  Kernels kernels, mean_kernels;
  float* x;  // the payload of n elements
  int64_t n, c, row_bytes, mean_bytes;
  int64_t code_end, mean_code_end;  // of a row; zeros follow
  const Piece* pieces;
  int64_t num_pieces;
  float enter, leave;     // weights of the lerps, where pieces have `other`
  float* residual;        // of n elements, or null
  float* chunk_residual;  // of c elements, or null
  float weight;           // of the sum over ranks
  uint8_t* rows;          // size rows each, contiguous
  uint8_t* peers;
  uint8_t* means;
  float* mean_scratch;  // of c elements, or null: decode_mean_encode does all
  int32_t swapped;      // as in Rows; there is no chunk_residual then
};

// Types of the elements of a sum.
enum { BAGUA_FLOAT32 = 0, BAGUA_FLOAT64 = 1, BAGUA_FLOAT16 = 2, BAGUA_BFLOAT16 = 3 };

// A sum over all ranks, in a ring. `other` of the pieces is not used.
struct Sum {
  uint8_t* x;  // n elements of `type`; becomes the sum
  int64_t n;
  int32_t type;
  float factor;         // of each summand
  const Piece* pieces;  // where the summands lie, fp32 alone; null: in x, and they have no factor
  int64_t num_pieces;
};

// What goes to one peer, or comes from it.
struct Transfer {
  int64_t peer;
  uint8_t* data;
  int64_t bytes;
};

BAGUA_API int32_t bagua_mesh_abi();
// Takes the descriptors over, fds[rank] is ignored. Null if there is no memory.
BAGUA_API Mesh* bagua_mesh_new(int32_t rank, int32_t size, const int32_t* fds);
// There and back to the rank that is farthest away, without queues, in microseconds; 0 where that is not known.
BAGUA_API int64_t bagua_mesh_round_trip_us(Mesh* mesh);
// 0, or -1 with a `problem`; after that the mesh is of no use, and its connections are shut down.
BAGUA_API int32_t bagua_mesh_exchange(Mesh* mesh, const Rows* rows, const Steps* steps, const Limits* limits,
                                      Problem* problem);
BAGUA_API int32_t bagua_mesh_exchange_encoded(Mesh* mesh, const Encoded* encoded, const Limits* limits,
                                              Problem* problem);
// Every rank of the mesh calls it with as many elements of one type.
BAGUA_API int32_t bagua_mesh_sum(Mesh* mesh, const Sum* sum, const Limits* limits, Problem* problem);
// All transfers at once, those of one peer in order. Ranks that nothing is exchanged with need not call it.
BAGUA_API int32_t bagua_mesh_swap(Mesh* mesh, const Transfer* sends, int64_t num_sends, const Transfer* receives,
                                  int64_t num_receives, const Limits* limits, Problem* problem);
// Shuts the connections down: an exchange in flight fails, here and at the peers.
BAGUA_API void bagua_mesh_abort(Mesh* mesh);
// Aborts, and closes once no exchange is in flight. The mesh itself remains.
BAGUA_API void bagua_mesh_close(Mesh* mesh);
// In a forked child: closes the copies of the descriptors, and leaves the parent's connections alone.
BAGUA_API void bagua_mesh_close_copies(Mesh* mesh);
BAGUA_API void bagua_mesh_free(Mesh* mesh);

// Passes bytes on between sockets 2 k and 2 k + 1, in a thread of its own, until one of the two ends; takes the
// descriptors over. Null if there is no memory or no thread; they are still the caller's then.
BAGUA_API Relay* bagua_relay_new(int32_t num_pairs, const int32_t* fds);
// Microseconds since the last byte; -1 once all pairs have ended.
BAGUA_API int64_t bagua_relay_quiet_us(Relay* relay);
// That have been passed on, in both directions.
BAGUA_API int64_t bagua_relay_bytes(Relay* relay);
// Ends all pairs.
BAGUA_API void bagua_relay_cut(Relay* relay);
// In a forked child: closes the copies of the descriptors.
BAGUA_API void bagua_relay_close_copies(Relay* relay);
// Ends all pairs, and waits for the thread.
BAGUA_API void bagua_relay_free(Relay* relay);
