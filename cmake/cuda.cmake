# The CUDA backend: whether it is built, with which nvcc, and how.
#
#   SONICMOE_CUDA=AUTO  when there is an nvcc; one that is too old is an error
#   SONICMOE_CUDA=ON    fails without an nvcc
#   SONICMOE_CUDA=OFF   the complete CPU library
#
#   SONICMOE_CUDA_ARCHITECTURES   what device code is compiled for
#
# find_nvcc.cmake looks for nvcc. Sets SONICMOE_HAS_CUDA; then the language CUDA is on and the target
# sonicmoe::cudart exists. Otherwise SONICMOE_NO_NVCC says why not.
set(SONICMOE_CUDA AUTO CACHE STRING "CUDA backend: AUTO, ON or OFF")
set_property(CACHE SONICMOE_CUDA PROPERTY STRINGS AUTO ON OFF)
# What device code is compiled for. Code for 80 runs on 8.x, code for 100 on 10.x, code for 120 on
# 12.x. The kernels of src/cuda/sm90 are compiled for 90a alone, and left out without it. N-virtual
# is PTX, which the driver compiles for devices without code of their own.
set(SONICMOE_CUDA_ARCHITECTURES "80;90a;100;120" CACHE STRING
    "Architectures of device code: some of 80, 90a, 100, 120; 80-virtual for PTX")
set(SONICMOE_HAS_CUDA OFF)
include(cmake/find_nvcc.cmake)
if(NOT SONICMOE_NVCC)
  message(STATUS "CUDA backend: off, because ${SONICMOE_NO_NVCC}")
  return()
endif()
set(nvcc ${SONICMOE_NVCC})

cmake_path(GET nvcc PARENT_PATH cuda_root)
file(REAL_PATH ${cuda_root}/.. cuda_root)
set(CMAKE_CUDA_COMPILER ${nvcc} CACHE FILEPATH "nvcc")
# Where the wheels keep what CMake's test programs link; nvcc looks into lib64.
set(ENV{LIBRARY_PATH} ${cuda_root}/lib:$ENV{LIBRARY_PATH})
set(CMAKE_CUDA_ARCHITECTURES OFF)  # by options below
# Linked by name: CMake's own way needs a whole toolkit, which the wheels are not.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)
set(SONICMOE_HAS_CUDA ON)
message(STATUS "CUDA backend: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${nvcc}")

# Static, so that programs start on machines without a driver; it loads the driver when asked.
find_library(SONICMOE_CUDART cudart_static REQUIRED NO_DEFAULT_PATH
             PATHS ${cuda_root} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib)
cmake_path(GET SONICMOE_CUDART PARENT_PATH SONICMOE_CUDART_DIR)
find_path(SONICMOE_CUDA_INCLUDE cuda_runtime_api.h REQUIRED NO_DEFAULT_PATH
          PATHS ${cuda_root} PATH_SUFFIXES include targets/x86_64-linux/include)
find_package(Threads REQUIRED)
add_library(sonicmoe::cudart STATIC IMPORTED)
set_target_properties(
  sonicmoe::cudart PROPERTIES IMPORTED_LOCATION ${SONICMOE_CUDART}
                              INTERFACE_INCLUDE_DIRECTORIES ${SONICMOE_CUDA_INCLUDE}
                              INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};rt")

# No contraction here either. Diagnostic 177: unused functions of headers that are there for others.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;--expt-relaxed-constexpr;-diag-suppress=177;-Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-Werror=switch,-ffp-contract=off,-fvisibility-inlines-hidden>"
)

# The options that compile for a list of architectures.
function(sonicmoe_gencode result)
  set(options "")
  foreach(architecture IN LISTS ARGN)
    if(architecture MATCHES "^([0-9]+a?)(-virtual)?$")
      set(kind sm)
      if(CMAKE_MATCH_2)
        set(kind compute)
      endif()
      list(APPEND options
           -gencode=arch=compute_${CMAKE_MATCH_1},code=${kind}_${CMAKE_MATCH_1})
    else()
      message(FATAL_ERROR "SONICMOE_CUDA_ARCHITECTURES: got ${architecture}, "
                          "allowed: 80, 90a, 100, 120, or a number with -virtual for PTX.")
    endif()
  endforeach()
  set(${result} ${options} PARENT_SCOPE)
endfunction()
sonicmoe_gencode(SONICMOE_GENCODE ${SONICMOE_CUDA_ARCHITECTURES})
set(SONICMOE_HAS_SM90 0)
if("90a" IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  set(SONICMOE_HAS_SM90 1)
endif()
