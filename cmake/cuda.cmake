# The CUDA backend: whether it is built, with which nvcc, and how.
#
#   SONICMOE_CUDA=AUTO  when nvcc >= 13.0 is found
#   SONICMOE_CUDA=ON    fails without it
#   SONICMOE_CUDA=OFF   the complete CPU library
#
# nvcc is looked for in CMAKE_CUDA_COMPILER, CUDACXX, PATH, /usr/local/cuda and the Python wheels of
# .venv (tools/setup.sh installs them there). Sets SONICMOE_HAS_CUDA; then the language CUDA is on and
# the target sonicmoe::cudart exists.
set(SONICMOE_CUDA AUTO CACHE STRING "CUDA backend for sm_90a: AUTO, ON or OFF")
set_property(CACHE SONICMOE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SONICMOE_HAS_CUDA OFF)
if(NOT SONICMOE_CUDA)
  return()
endif()

function(sonicmoe_no_cuda why)
  if(SONICMOE_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA backend: off (${why})")
  else()
    message(FATAL_ERROR "SONICMOE_CUDA is ${SONICMOE_CUDA}, but ${why}. "
                        "tools/setup.sh installs what is missing into .venv.")
  endif()
endfunction()

file(GLOB site_packages ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages)
find_program(nvcc_of_path nvcc NO_CACHE)
set(candidates ${CMAKE_CUDA_COMPILER})
if(NOT candidates)
  list(APPEND candidates $ENV{CUDACXX} ${nvcc_of_path} /usr/local/cuda/bin/nvcc)
  foreach(packages IN LISTS site_packages)
    list(APPEND candidates ${packages}/nvidia/cu13/bin/nvcc)
  endforeach()
endif()
set(nvcc "")
foreach(candidate IN LISTS candidates)
  execute_process(COMMAND ${candidate} --version OUTPUT_VARIABLE version ERROR_QUIET
                  RESULT_VARIABLE failed)
  string(REGEX MATCH "release ([0-9.]+)" version "${version}")
  if(failed STREQUAL "0" AND CMAKE_MATCH_1 VERSION_GREATER_EQUAL 13.0)
    set(nvcc ${candidate})
    break()
  endif()
endforeach()
if(NOT nvcc)
  sonicmoe_no_cuda("there is no nvcc of CUDA 13.0 or newer")
  return()
endif()

cmake_path(GET nvcc PARENT_PATH cuda_root)
file(REAL_PATH ${cuda_root}/.. cuda_root)
set(CMAKE_CUDA_COMPILER ${nvcc} CACHE FILEPATH "nvcc")
# Where the wheels keep what CMake's test programs link; nvcc looks into lib64.
set(ENV{LIBRARY_PATH} ${cuda_root}/lib:$ENV{LIBRARY_PATH})
set(CMAKE_CUDA_ARCHITECTURES OFF)  # the one below
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
  "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a;--fmad=false;--expt-relaxed-constexpr;-diag-suppress=177;-Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-Werror=switch,-ffp-contract=off,-fvisibility-inlines-hidden>"
)
