# Looks for the nvcc of the CUDA backend. cmake/cuda.cmake includes this file;
# cmake/build_backend.py runs it alone, before a wheel gets its version:
#
#   cmake [-DSONICMOE_CUDA=AUTO] [-DCMAKE_CUDA_COMPILER=nvcc] -P cmake/find_nvcc.cmake
#
# Sets SONICMOE_NVCC, or leaves it empty and says why in SONICMOE_NO_NVCC. Run alone, it prints
# SONICMOE_NVCC. An nvcc that is named must be usable. One that is only found must not be too old
# either, unless another is new enough: a package without its kernels would surprise later.

# The oldest that these sources were compiled with. The Python wheels of 12.9 hold ptxas, but no nvcc
# to try.
set(SONICMOE_NVCC_MINIMUM 13.0)
set(SONICMOE_NVCC "")
set(SONICMOE_NO_NVCC "")

# Ends the configuration with the text of its arguments and the ways to leave the backend out.
function(sonicmoe_nvcc_error)
  list(JOIN ARGN "" text)
  message(FATAL_ERROR
    "${text}\nTo build for the CPU alone:\n"
    "  pip install . --config-settings=cmake.define.SONICMOE_CUDA=OFF\n"
    "  make build CUDA=OFF\n"
    "  cmake -DSONICMOE_CUDA=OFF\n")
endfunction()

# Sets `result` to the release of an nvcc, or to nothing when it does not run.
function(sonicmoe_nvcc_release nvcc result)
  set(CMAKE_MATCH_1 "")
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE code)
  if(code STREQUAL "0")
    string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" text "${text}")
  endif()
  set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

function(sonicmoe_find_nvcc)
  if(NOT SONICMOE_CUDA)
    set(SONICMOE_NO_NVCC "SONICMOE_CUDA is OFF" PARENT_SCOPE)
    return()
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(named CMAKE_CUDA_COMPILER)
    set(candidates ${CMAKE_CUDA_COMPILER})
  elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(named CUDACXX)
    set(candidates $ENV{CUDACXX})
  else()
    set(named "")
    # The same places in a project and in a script, whose default paths differ.
    find_program(nvcc_of_path nvcc NO_CACHE NO_DEFAULT_PATH PATHS ENV PATH)
    set(toolkit /usr/local/cuda)
    if(NOT "$ENV{CUDA_HOME}" STREQUAL "")
      set(toolkit $ENV{CUDA_HOME})
    endif()
    # tools/setup.sh installs the Python wheels that make up a toolkit into .venv.
    cmake_path(GET CMAKE_CURRENT_FUNCTION_LIST_DIR PARENT_PATH root)
    file(GLOB wheels ${root}/.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
    set(candidates ${nvcc_of_path} ${toolkit}/bin/nvcc ${wheels})
  endif()

  set(others "")
  foreach(candidate IN LISTS candidates)
    if(named AND NOT IS_ABSOLUTE ${candidate})
      find_program(nvcc_of_path ${candidate} NO_CACHE NO_DEFAULT_PATH PATHS ENV PATH)
      if(nvcc_of_path)
        set(candidate ${nvcc_of_path})
      endif()
    endif()
    sonicmoe_nvcc_release(${candidate} release)
    if(release VERSION_GREATER_EQUAL SONICMOE_NVCC_MINIMUM)
      set(SONICMOE_NVCC ${candidate} PARENT_SCOPE)
      return()
    elseif(release)
      list(APPEND others "nvcc ${release} (${candidate})")
    elseif(named)
      sonicmoe_nvcc_error("${named}: got ${candidate}, which does not run or is no nvcc, "
                          "allowed: nvcc ${SONICMOE_NVCC_MINIMUM} or newer.")
    endif()
  endforeach()

  if(others)
    list(REMOVE_DUPLICATES others)
    list(JOIN others ", " others)
    sonicmoe_nvcc_error(
      "SONICMOE_CUDA: got ${others}, allowed: nvcc ${SONICMOE_NVCC_MINIMUM} or newer.\n"
      "Install a newer CUDA toolkit and put its nvcc into PATH, or name it in CUDACXX.")
  elseif(NOT SONICMOE_CUDA STREQUAL "AUTO")
    sonicmoe_nvcc_error(
      "SONICMOE_CUDA: got ${SONICMOE_CUDA}, but there is no nvcc in PATH or ${toolkit}.\n"
      "Install a CUDA toolkit of ${SONICMOE_NVCC_MINIMUM} or newer and put its nvcc into PATH, or "
      "name it in CUDACXX. In a source tree, tools/setup.sh installs one into .venv.")
  endif()
  set(SONICMOE_NO_NVCC "there is no nvcc in PATH or ${toolkit}" PARENT_SCOPE)
endfunction()

if(NOT DEFINED SONICMOE_CUDA)
  set(SONICMOE_CUDA AUTO)
endif()
sonicmoe_find_nvcc()
if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  execute_process(COMMAND ${CMAKE_COMMAND} -E echo "${SONICMOE_NVCC}")
endif()
