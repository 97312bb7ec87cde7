#pragma once

#include "core/device_traits.h"

/// Devices that choices can be looked up for without having them, as their drivers describe them.
namespace sonicmoe {

inline constexpr DeviceTraits kH100Sxm{.arch = 90,
                                       .multiprocessors = 132,
                                       .l2_bytes = 50 << 20,
                                       .shared_bytes = 228 << 10,
                                       .block_shared_bytes = 227 << 10};

/// `device` with other multiprocessors and another L2.
constexpr DeviceTraits like(DeviceTraits device, int multiprocessors, std::int64_t l2_bytes) {
  device.multiprocessors = multiprocessors;
  device.l2_bytes = l2_bytes;
  return device;
}

inline constexpr DeviceTraits kH100Pcie = like(kH100Sxm, 114, 50 << 20);
inline constexpr DeviceTraits kH200 = like(kH100Sxm, 132, 60 << 20);

// By their published specifications; none of them has run a kernel here.
inline constexpr DeviceTraits kA100{.arch = 80,
                                    .multiprocessors = 108,
                                    .l2_bytes = 40 << 20,
                                    .shared_bytes = 164 << 10,
                                    .block_shared_bytes = 163 << 10};
inline constexpr DeviceTraits kL40S{.arch = 89,
                                    .multiprocessors = 142,
                                    .l2_bytes = 96 << 20,
                                    .shared_bytes = 100 << 10,
                                    .block_shared_bytes = 99 << 10};
inline constexpr DeviceTraits kRtx4090 = like(kL40S, 128, 72 << 20);
inline constexpr DeviceTraits kB200{.arch = 100,
                                    .multiprocessors = 148,
                                    .l2_bytes = 126 << 20,
                                    .shared_bytes = 228 << 10,
                                    .block_shared_bytes = 227 << 10};
inline constexpr DeviceTraits kRtx5090{.arch = 120,
                                       .multiprocessors = 170,
                                       .l2_bytes = 96 << 20,
                                       .shared_bytes = 100 << 10,
                                       .block_shared_bytes = 99 << 10};

}  // namespace sonicmoe
