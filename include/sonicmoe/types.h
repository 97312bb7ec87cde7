#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "sonicmoe/export.h"

namespace sonicmoe {

/// Storage type of x, weights, H, A, Y, gradients and logits. Scores and their gradients are fp32.
/// Operations accumulate in fp32, the auxiliary loss over tokens in fp64. The CPU runs f32 and
/// bf16; CUDA runs bf16 and f16. CUDA's operations on logits alone (top_k, score_grad, aux_loss,
/// token rounding) run f32, too.
enum class DType : std::int32_t { f32 = 0, bf16 = 1, f16 = 2 };

/// A gated activation has h = [g, u]: swiglu is silu(g) u, geglu is gelu(g) u, reglu is relu(g) u.
/// With a finite `limit` swiglu is silu(min(g, limit)) clamp(u, -limit, limit). relu_sq is
/// relu(h)^2. gelu and geglu use erf, the _tanh kinds the tanh form. relu'(0) = 0. The slope of min
/// and clamp is 1 inside and at the limit, 0 beyond it.
enum class Activation : std::int32_t {
  swiglu = 0,
  geglu = 1,
  geglu_tanh = 2,
  reglu = 3,
  relu = 4,
  relu_sq = 5,
  gelu = 6,
  gelu_tanh = 7,
  silu = 8,
  swiglu_clamp_after = 9,  ///< min(silu(g), limit) clamp(u, -limit, limit); limit inf
  swiglu_oai = 10,         ///< g' sigmoid(alpha g') (clamp(u, -limit, limit) + 1), g' = min(g,
                           ///< limit); alpha 1.702, limit 7
  situ_glu = 11,           ///< alpha tanh(g / alpha) sigmoid(g) beta tanh(u / beta); 4 and 25
  quick_geglu = 12,        ///< g sigmoid(1.702 g) u
};

/// An activation and its parameters. An Activation converts to a spec with that kind's defaults. A
/// parameter that the kind does not have keeps the value below; plans refuse any other value.
struct ActivationSpec {
  Activation kind = Activation::swiglu;
  float alpha = 1.0f;
  float beta = 1.0f;
  float limit = std::numeric_limits<float>::infinity();

  ActivationSpec() = default;
  SONICMOE_API ActivationSpec(Activation value) noexcept;  // NOLINT: implicit by design
  bool operator==(const ActivationSpec&) const = default;
};

/// How W1 (and dW1) holds gate and up of a gated activation, and which way the weights lie. b1 and
/// db1 follow. The first three have W1 (E, 2n, d) and W2 (E, d, n). The transposed ones have W1
/// (E, d, 2n) and W2 (E, n, d), and so have their gradients.
///
/// Without a gate W1 has n rows or columns and order means nothing; plans refuse `separate`.
enum class W1Layout : std::int32_t {
  interleaved = 0,             ///< rows g0, u0, g1, u1, ...
  concatenated = 1,            ///< rows g0 .. g(n-1), u0 .. u(n-1)
  separate = 2,                ///< two tensors (E, n, d): w1 holds the gate, w1_up the up rows
  transposed = 3,              ///< columns g0 .. g(n-1), u0 .. u(n-1)
  transposed_interleaved = 4,  ///< columns g0, u0, g1, u1, ...
};

/// Which rows the experts work on.
enum class RowSource : std::int32_t {
  gathered = 0,    ///< rows of x by token id; several rows may have one token
  contiguous = 1,  ///< the rows of x themselves, which the caller has put in expert order
};

/// Where the score s of a row enters. In both formulas s multiplies in fp32, before y is rounded.
enum class ScoreAt : std::int32_t {
  combine = 0,      ///< in the sum of a token's rows, which the experts leave to another operation
  none = 1,         ///< rows have no scores
  before_down = 2,  ///< y = (s A) W2^T + b2
  after_down = 3,   ///< y = s (A W2^T + b2)
};

/// Which of forward's results backward makes again, in place of reading what forward kept.
enum class Recompute : std::int32_t {
  none = 0,    ///< nothing: forward keeps H, the pre-activation
  preact = 1,  ///< H, by the up projection, without the down projection
};

/// Type of the counts and offsets that a caller gives with contiguous rows.
enum class IndexType : std::int32_t { i32 = 0, i64 = 1 };

/// How the logit z of an expert becomes its score p.
enum class RouterScore : std::int32_t {
  softmax = 0,        ///< e^z over the sum of e^z; RouterOrder says over which experts
  sigmoid = 1,        ///< 1 / (1 + e^-z)
  sqrt_softplus = 2,  ///< sqrt(log(1 + e^z))
};

/// Whether a token's K experts are chosen before their scores are made. They are stored by
/// descending value; ties go to the lower expert id. With ids of the caller nothing is chosen.
enum class RouterOrder : std::int32_t {
  select_then_score = 0,  ///< the K largest logits; a softmax runs over these K
  score_then_select = 1,  ///< the K largest scores; a softmax runs over all E
};

/// The value of a group of experts: of the values that choose them, the largest or the sum of the
/// two largest.
enum class GroupScore : std::int32_t { largest = 0, sum_of_two = 1 };

/// A loss on the logits; AuxLossArgs has the formulas.
enum class RouterLoss : std::int32_t { balance = 0, z = 1 };

/// What the caller hands over. An id < 0 or >= E is a sentinel: it is not counted, contributes
/// zero, and its score gets a gradient of zero. Duplicate ids add.
enum class RouterInput : std::int32_t {
  projection = 0,       ///< x and the router's weights: logits = x Wr^T
  logits = 1,           ///< logits (T, E), in place of that product
  logits_and_ids = 2,   ///< and ids (T, K): nothing is chosen, the mode scores these ids
  ids_and_weights = 3,  ///< ids and weights (T, K): the weights are the scores as they are
  lists = 4,            ///< lists of token id, expert id and score, of any length
};

/// Kinds of devices. One build has kernels for the CPU and may have some for CUDA.
enum class DeviceType : std::int32_t { cpu = 0, cuda = 1 };

/// How token rounding (token_rounding.h) rounds an expert's count f: down to `floor` or up to
/// `ceil`, the two multiples of the tile beside f.
enum class RoundingRule : std::int32_t {
  nearest = 0,         ///< "NR-f": the nearer multiple, ties down
  stochastic = 1,      ///< "SR-f": up with probability (f - floor) / tile
  nearest_scores = 2,  ///< "NR-s": up with probability D / (D + A). D sums the TC scores that floor
                       ///< drops, A the probabilities that ceil adds
  balance = 3,         ///< "Balance-f": experts ascending; up if that leaves the sum of all
                       ///< deviations so far (rounded count - f) smaller in magnitude
  up = 4,              ///< always up
  down = 5,            ///< always down
};

/// Upper bound on the rows after token rounding, from sizes alone:
/// min(T*E, T*K + min(E, T*K)*(tile-1)).
constexpr std::int64_t rounded_capacity(std::int64_t tokens, std::int64_t experts,
                                        std::int64_t top_k, std::int64_t tile) noexcept {
  const std::int64_t chosen = tokens * top_k;
  const std::int64_t grown = chosen + (experts < chosen ? experts : chosen) * (tile - 1);
  return grown < tokens * experts ? grown : tokens * experts;
}

/// Where a plan runs.
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;  ///< CUDA ordinal; 0 for the CPU
  bool operator==(const Device&) const = default;
};

/// An opaque handle: a cudaStream_t for CUDA, ignored on the CPU.
struct Stream {
  void* handle = nullptr;
};

/// Memory of the plan's device that the caller lends for one call. `data` is a multiple of 256
/// bytes; null is fine for a plan that needs 0 bytes. Contents before and after the call mean
/// nothing.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Which operations of a plan's call run: bit i stands for the i-th name of forward_operations() or
/// backward_operations(). It serves to time an operation by itself. Where a call leaves operations
/// out, the others read the results that an earlier call with the same arguments and workspace left
/// there. Only calls with kAllOperations write the optional outputs `scores` and `expert_ids`.
using OperationMask = std::uint64_t;
/// The whole call.
inline constexpr OperationMask kAllOperations = ~OperationMask{0};

/// How a plan is made, apart from what it computes.
struct Options {
  /// CPU threads of a call, up to 4096; 0 = all that the process may use. Results do not depend on
  /// it.
  int threads = 0;
  /// CUDA only: the call waits for the device and refuses bad data (StatusCode::invalid_data)
  /// instead of skipping it. A graph cannot capture such a call. CPU calls need not ask for it.
  bool checked = false;
  /// CUDA only: how many multiprocessors Hopper's products and sums with the router's part fill, an
  /// even number; 0 = all. The others stay free, for communication. Short kernels around them and
  /// portable products use all. Plans choose tiles for this number, which changes the order of two
  /// fp32 sums: dS goes tile by tile along n, dWr part by part of the tokens.
  int multiprocessors = 0;
  /// The entry of the kernel list to run ("sm90.up_proj.128x256"), or its backend ("cpu", "cuda")
  /// or architecture ("sm90"). It binds those operations of a plan that have such an entry.
  /// make_plan returns `unsupported` if none has, or if the entry rejects the descriptor. Empty:
  /// the first entry that neither rejects nor defers (see explain()).
  std::string kernel = {};
};

SONICMOE_API const char* name(DType value) noexcept;        ///< "bf16"; "?" if unknown
SONICMOE_API const char* name(Activation value) noexcept;   ///< "swiglu"; "?" if unknown
SONICMOE_API const char* name(W1Layout value) noexcept;     ///< "interleaved"; "?" if unknown
SONICMOE_API const char* name(RouterScore value) noexcept;  ///< "softmax"; "?" if unknown
SONICMOE_API const char* name(RouterOrder value) noexcept;  ///< "select_then_score"; "?" if unknown
SONICMOE_API const char* name(RouterLoss value) noexcept;   ///< "balance"; "?" if unknown
SONICMOE_API const char* name(GroupScore value) noexcept;   ///< "largest"; "?" if unknown
SONICMOE_API const char* name(RouterInput value) noexcept;  ///< "projection"; "?" if unknown
SONICMOE_API const char* name(RowSource value) noexcept;    ///< "gathered"; "?" if unknown
SONICMOE_API const char* name(ScoreAt value) noexcept;      ///< "combine"; "?" if unknown
SONICMOE_API const char* name(Recompute value) noexcept;    ///< "none"; "?" if unknown
SONICMOE_API const char* name(IndexType value) noexcept;    ///< "i32"; "?" if unknown
SONICMOE_API const char* name(RoundingRule value) noexcept;  ///< "nearest"; "?" if unknown
SONICMOE_API const char* name(DeviceType value) noexcept;    ///< "cpu"; "?" if unknown

SONICMOE_API bool is_glu(Activation value) noexcept;  ///< has a gate: W1 has 2n rows
inline bool is_glu(const ActivationSpec& value) noexcept { return is_glu(value.kind); }
SONICMOE_API std::span<const Activation> activations() noexcept;      ///< every kind, in order
SONICMOE_API std::size_t size_of(DType value) noexcept;               ///< bytes; 0 if unknown
SONICMOE_API bool parse(const std::string& text, DType* out);         ///< false if unknown
SONICMOE_API bool parse(const std::string& text, RoundingRule* out);  ///< or "nr", "sr", "nr_s"
/// The text form of an activation: its name, then the parameters that differ from the kind's
/// defaults, as in "swiglu" or "name(alpha=1.702,limit=7)".
SONICMOE_API std::string to_string(const ActivationSpec& value);
/// Reads the text form. False, and nothing written, if a name is unknown or comes twice, or if a
/// value is no number. Plans, not this function, refuse values that the kind does not allow.
SONICMOE_API bool parse(const std::string& text, ActivationSpec* out);

}  // namespace sonicmoe
