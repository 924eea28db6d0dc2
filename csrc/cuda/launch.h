// Host side of every launch: error checks, properties of the current device, run-time value -> template argument.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "../common/float8.h"
#include "../params.h"

namespace paged_kv::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

struct Device {
  int num_sms = 0;
  int shared_bytes = 0;  // that one thread block may ask for
  int compute_capability = 0;  // 90 = 9.0
};

inline constexpr int kMaxDevices = 64;

inline int current_device_index() {
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  if (index >= kMaxDevices) throw std::runtime_error("device index must be below 64, got " + std::to_string(index));
  return index;
}

// Properties of the current device, asked for once. Two threads may both ask: they store the same values.
inline const Device& current_device() {
  static Device devices[kMaxDevices];
  const int index = current_device_index();
  Device& device = devices[index];
  if (device.num_sms == 0) {
    check(cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index), "attribute");
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "attribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), "attribute");
    device.compute_capability = 10 * major + minor;
    int num_sms = 0;
    check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, index), "attribute");
    device.num_sms = num_sms;
  }
  return device;
}

enum class Order { after_predecessor, beside_predecessor };

// Launches a kernel. `beside_predecessor`: it comes up while its predecessor runs, if it was compiled to wait for it
// (wait_for_predecessor; every thread must).
template <auto kKernel, class Params>
void launch_in_order(Order order, dim3 grid, dim3 block, int64_t shared_bytes, const Params& params,
                     cudaStream_t stream, const char* op) {
  struct Known {
    bool asked = false, waits = false;
    int64_t shared_bytes = 0;
  };
  static Known devices[kMaxDevices];  // of this kernel
  Known& known = devices[current_device_index()];
  if (!known.asked || known.shared_bytes < shared_bytes) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kKernel), op);
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)), op);
    known = {true, attributes.ptxVersion >= 90, shared_bytes};
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = order == Order::beside_predecessor && known.waits ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kKernel, params), op);
}

inline int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

template <class T>
struct Type {
  using type = T;
};

// Calls function(Type<T>{}) with the element type of a query, key or value.
template <class Function>
void dispatch_float(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::float32: return function(Type<float>{});
    case DType::float16: return function(Type<Float16>{});
    case DType::bfloat16: return function(Type<BFloat16>{});
    default:
      throw std::invalid_argument("dtype must be float32, float16 or bfloat16, got " + std::to_string(int(dtype)));
  }
}

// Calls function(Type<T>{}) with the element type of a cache.
template <class Function>
void dispatch_cache(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::float8_e4m3fn: return function(Type<Float8E4M3>{});
    case DType::float8_e5m2: return function(Type<Float8E5M2>{});
    case DType::int8: return function(Type<int8_t>{});
    default: return dispatch_float(dtype, function);
  }
}

}  // namespace paged_kv::cuda
