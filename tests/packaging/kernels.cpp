// Calls the compiled kernels of the baseline instruction set on made input and prints a digest of what each wrote.
// usage: kernels PATH/_native.so. Machines of any kind must print the same.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

#include <string>
#include <vector>

namespace {

struct Codec {
  const char* name;
  int64_t block, head, bits;  // elements a block; bytes of a block's header; bits an element
};

// The layouts of abi.h: a header for each block, then the codes of all elements.
const Codec kCodecs[] = {{"minmax_uint8", 64, 8, 8}, {"int4", 64, 4, 4},  {"sign", 64, 4, 1},  {"eden1", 64, 8, 1},
                         {"eden2", 64, 8, 2},        {"eden3", 64, 8, 3}, {"eden4", 64, 8, 4},
                         {"eden1x8", 64, 4, 1},      {"eden1x32", 64, 4, 1}, {"eden2x8", 64, 4, 2}};
const int64_t kRows = 3, kElements = 1000;

void* library;

template <typename Function>
Function find(const std::string& name) {
  void* found = dlsym(library, ("bagua_" + name + "_baseline").c_str());
  if (!found) {
    fprintf(stderr, "%s\n", dlerror());
    _Exit(1);
  }
  return reinterpret_cast<Function>(found);
}

// Whole numbers over a power of two: every machine makes the same ones.
std::vector<float> made(int64_t count, uint32_t seed) {
  std::vector<float> values(count);
  for (auto& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(seed >> 8) - (1 << 23)) / (1 << 21);
  }
  return values;
}

template <typename T>
void print(const std::string& name, const std::vector<T>& values) {
  uint64_t digest = 14695981039346656037u;  // FNV-1a
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) digest = (digest ^ bytes[i]) * 1099511628211u;
  printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(digest));
}

void run(const Codec& codec) {
  const std::string name = codec.name;
  const int64_t blocks = (kElements + codec.block - 1) / codec.block, head = blocks * codec.head;
  const int64_t stride = head + blocks * codec.block * codec.bits / 8;
  auto x = made(kRows * kElements, 1);
  std::vector<uint8_t> wire(kRows * stride), one(stride);
  auto encode = find<void (*)(const float*, int64_t, int64_t, int64_t, int64_t, uint8_t*, uint8_t*, int64_t)>(
      name + "_encode");
  encode(x.data(), kElements, kRows, kElements, codec.block, wire.data(), wire.data() + head, stride);
  print(name + " encode", wire);

  std::vector<float> out(kRows * kElements), scratch(4096);
  find<void (*)(const uint8_t*, const uint8_t*, int64_t, int64_t, int64_t, int64_t, float*, int64_t, int64_t)>(
      name + "_decode")(wire.data(), wire.data() + head, stride, kRows, kElements, codec.block, out.data(), kElements,
                        1 << 25);
  print(name + " decode", out);

  std::vector<float> mean(kElements);
  find<void (*)(const uint8_t*, const uint8_t*, int64_t, int64_t, int64_t, int64_t, float, float*)>(
      name + "_decode_mean")(wire.data(), wire.data() + head, stride, kRows, kElements, codec.block, 1.0f / 3,
                             mean.data());
  print(name + " decode_mean", mean);

  auto residual = made(kRows * kElements, 2);
  find<void (*)(const float*, int64_t, float*, int64_t, int64_t, int64_t, int64_t, uint8_t*, uint8_t*, int64_t)>(
      name + "_encode_feedback")(x.data(), kElements, residual.data(), kElements, kRows, kElements, codec.block,
                                 wire.data(), wire.data() + head, stride);
  print(name + " encode_feedback", wire);
  print(name + " residual", residual);

  find<void (*)(const uint8_t*, const uint8_t*, int64_t, int64_t, int64_t, int64_t, float, float*, float*, uint8_t*,
                uint8_t*)>(name + "_decode_mean_encode")(wire.data(), wire.data() + head, stride, kRows, kElements,
                                                         codec.block, 1.0f / 3, residual.data(), scratch.data(),
                                                         one.data(), one.data() + head);
  print(name + " decode_mean_encode", one);

  auto me = made(kElements, 3), peers = made(2 * kElements, 4);
  const float weights[] = {0.25f, 0.5f};
  find<void (*)(float*, float*, const float*, int64_t, const float*, int64_t, int64_t, int64_t, float*, uint8_t*,
                uint8_t*)>(name + "_encode_difference")(x.data(), me.data(), peers.data(), kElements, weights, 2,
                                                        kElements, codec.block, scratch.data(), one.data(),
                                                        one.data() + head);
  print(name + " encode_difference", one);
  print(name + " me", me);

  find<void (*)(const uint8_t*, const uint8_t*, int64_t, int64_t, int64_t, int64_t, float*, float*, int64_t)>(
      name + "_decode_add")(wire.data(), wire.data() + head, stride, kRows, kElements, codec.block, scratch.data(),
                            out.data(), kElements);
  print(name + " decode_add", out);
}

void run_others() {
  auto x = made(kRows * kElements, 5);
  const auto* bytes = reinterpret_cast<const uint8_t*>(x.data());
  std::vector<float> out(kElements);
  for (const char* type : {"float32", "bfloat16", "float16"}) {
    std::vector<uint8_t> rows(bytes, bytes + 4 * kRows * kElements);
    if (std::string(type) != "float32")  // exponents far from those of infinities
      for (auto& byte : rows) byte &= 0x3b;
    find<void (*)(const uint8_t*, int64_t, int64_t, int64_t, float, float*)>(std::string("mean_") + type)(
        rows.data(), 4 * kElements, kRows, kElements, 1.0f / 3, out.data());
    print(std::string("mean ") + type, out);
  }
  const int64_t block = 100, k = 7, count = kElements / block * k, capacity = 256;
  std::vector<int32_t> candidates(2 * capacity);
  std::vector<uint8_t> wire(kRows * count * 8);
  find<void (*)(const float*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int32_t*, int64_t, uint8_t*,
                int64_t)>("top_k_encode")(x.data(), kElements, kRows, kElements, block, k, k, candidates.data(),
                                          capacity, wire.data(), count * 8);
  print("top_k encode", wire);
  std::vector<int64_t> at(kRows);
  const int32_t damaged = find<int32_t (*)(const uint8_t*, int64_t, int64_t, int64_t, int64_t, float, int64_t*, float*)>(
      "top_k_decode_mean")(wire.data(), count * 8, kRows, count, kElements, 0.5f, at.data(), out.data());
  print("top_k decode_mean", out);
  printf("top_k damaged %d\n", damaged);
}

}  // namespace

int main(int argc, char** argv) {
  library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) {
    fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: kernels PATH/_native.so");
    return 1;
  }
  printf("abi %d\n", reinterpret_cast<int32_t (*)()>(dlsym(library, "bagua_codecs_abi"))());
  for (const auto& codec : kCodecs) run(codec);
  run_others();
}
