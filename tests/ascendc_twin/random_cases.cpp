// SPDX-License-Identifier: Apache-2.0
//
// For sanitizers: random jobs on the twin against plain loops, every fault, and, if asked for, a race.
//
//   random_cases CASES      exit code 0: all equal, all faults found
//   random_cases race       cores that write the same bytes, for ThreadSanitizer to find
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../../csrc/block_ops/cpu/sum_cpu.cpp"
#include "faults.h"
#include "run.h"

namespace {

std::mt19937_64 generator(20261120);

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

int64_t pick_row() {
  constexpr int64_t kRows[] = {1, 31, 32, 96, 100, 256, 1000, 1024, 4096, 8224, 70001};
  return kRows[pick(0, std::size(kRows) - 1)];
}

std::vector<std::byte> random_bytes(int64_t size) {
  std::vector<std::byte> data(size + sizeof(uint64_t));
  for (int64_t i = 0; i < size; i += sizeof(uint64_t)) {
    const uint64_t eight = generator();
    std::memcpy(&data[i], &eight, sizeof eight);
  }
  data.resize(size);
  return data;
}

twin::Chip pick_chip() { return {pick(1, 12), pick(16, 192) * 1024}; }

bool split_case() {
  const int64_t row = pick_row(), splits = pick(1, 4), tokens = pick(1, row > 4096 ? 2 : 20), units = pick(1, 4);
  const int64_t num_caches = pick(1, 3), unit = splits * tokens * row;
  // Several sections of units, as a gather has them, or of splits.
  const int64_t share = splits == 1 ? pick(1, units) : units, sections = splits + (units - 1) / share;
  std::vector<std::vector<std::byte>> memory;
  for (int64_t c = 0; c < num_caches; ++c) memory.push_back(random_bytes(unit * 2 + pick(0, 9)));
  std::vector<int64_t> offsets(units);
  for (int64_t& offset : offsets) offset = pick(0, unit);
  const int64_t inner = share * tokens * row + pick(0, 9), outer = inner * sections + pick(0, 9), begin = pick(0, 9);
  std::vector<std::byte> out = random_bytes(begin + outer * num_caches + inner + 5), expected = out;

  twin::Split job{{},         offsets.data(), units, share, splits, tokens,
                  row,        out.data(),     static_cast<int64_t>(out.size()), begin, outer, inner};
  for (const auto& cache : memory) job.caches.push_back({cache.data(), static_cast<int64_t>(cache.size())});
  twin::run(pick_chip(), job);
  for (int64_t c = 0; c < num_caches; ++c)
    for (int64_t n = 0; n < units; ++n)
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t k = 0; k < splits; ++k)
          std::memcpy(&expected[begin + c * outer + (k + n / share) * inner + (n % share * tokens + t) * row],
                      &memory[c][offsets[n] + (t * splits + k) * row], row);
  return out == expected;
}

bool interleave_case() {
  const int64_t row = pick_row(), ranks = pick(1, 5), tokens = pick(1, row > 4096 ? 3 : 90);
  const int64_t stride = tokens * row + pick(0, 9), begin = pick(0, 9);
  const std::vector<std::byte> src = random_bytes(begin + ranks * stride);
  std::vector<std::byte> out = random_bytes(begin + ranks * tokens * row + 5), expected = out;
  twin::run(pick_chip(), twin::Interleave{src.data(), static_cast<int64_t>(src.size()), begin, stride, ranks, tokens,
                                          row, out.data(), static_cast<int64_t>(out.size()), begin});
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < ranks; ++i)
      std::memcpy(&expected[begin + (t * ranks + i) * row], &src[begin + i * stride + t * row], row);
  return out == expected;
}

// Against the CPU's op.
bool sum_case() {
  const int64_t num_caches = pick(0, 7) ? pick(1, 3) : 9;
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::vector<int64_t>> numbers;  // stay where they are when the vector grows
  std::vector<twin::Sum> jobs;
  const auto some = [&](int64_t count, int64_t low, int64_t high) {
    numbers.emplace_back(count);
    for (int64_t& number : numbers.back()) number = pick(low, high);
    return numbers.back().data();
  };
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  int64_t sums = 0;
  for (int64_t c = 0; c < num_caches; ++c) {
    const int64_t word_bytes = 1 << pick(0, 2);
    const bool is_long = pick(0, 15) == 0;  // longer than a tile
    const int64_t words = is_long ? (32 * 1024 + pick(0, 900)) / word_bytes + 1 : pick(1, 90);
    const int64_t entries = pick(1, is_long ? 2 : 20), heads = pick(1, is_long ? 2 : 4), units = pick(1, 3);
    const int64_t unit = entries * heads * words * word_bytes;
    memory.push_back(random_bytes(2 * unit + pick(0, 9)));
    jobs.push_back({{memory.back().data(), static_cast<int64_t>(memory.back().size())}, some(units, 0, unit),
                    some(units * entries, -kAny, kAny), some(words, -kAny, kAny), nullptr, units, entries, heads, words,
                    word_bytes});
    sums += units * heads;
  }
  std::vector<int64_t> out(sums, -1), expected(sums);
  for (std::vector<int64_t>* to : {&expected, &out}) {
    int64_t* next = to->data();
    for (twin::Sum& job : jobs) {
      job.out = next;
      next += job.units * job.heads;
      if (to == &expected) vllm_ascend_pd::sum_steps(job, 0, job.units);
    }
  }
  twin::run(pick_chip(), jobs);
  return out == expected;
}

bool is_right(const std::string& fault) { return fault == "none" || fault == "no missing flag"; }

bool found(const std::string& fault) {
  try {
    twin::run_fault(fault);
    return is_right(fault);
  } catch (const std::logic_error&) {
    return !is_right(fault);
  }
}

void race() {
  static uint8_t shared[64];
  AscendC::twin::launch(2, [] {
    twin::Core core;
    twin::Bytes memory;
    memory.SetGlobalBuffer(shared, sizeof shared);
    for (int i = 0; i < 1000; ++i) core.copy(core.global, memory, {1, sizeof shared, 0, 0, 0});
  });
}

}  // namespace

int main(int, char** argv) {
  if (std::string(argv[1]) == "race") return race(), 0;
  const int cases = std::atoi(argv[1]);
  int failures = 0;
  for (int i = 0; i < cases; ++i)
    try {
      if (!(i % 3 == 0 ? split_case() : i % 3 == 1 ? interleave_case() : sum_case())) ++failures, std::printf("case %d is not equal\n", i);
    } catch (const std::logic_error& error) {
      ++failures, std::printf("case %d: %s\n", i, error.what());
    }
  for (const auto& [name, fault] : twin::faults())
    if (!found(name)) ++failures, std::printf("not found: %s\n", name.c_str());
  std::printf("%d cases, %zu faults, %d failures\n", cases, twin::faults().size(), failures);
  return failures ? 1 : 0;
}
