# private_openblas(<object>)
#
# Makes <object>: cblas_sgemm of the static OpenBLAS with all that it needs, in one object file. It
# is called sonicmoe_cblas_sgemm there and is hidden, every other symbol is local. So a program that
# links us may use any BLAS, another OpenBLAS included, without a clash of symbols; and an installed
# static library needs no OpenBLAS. It is the serial build, which starts no threads;
# private_openblas.cpp adds what that build lacks.
function(private_openblas object)
  find_library(SONICMOE_OPENBLAS NAMES libopenblas.a PATH_SUFFIXES openblas-serial)
  if(NOT SONICMOE_OPENBLAS)
    message(FATAL_ERROR
      "SONICMOE_OPENBLAS: libopenblas.a is missing.\n"
      "Install OpenBLAS as a static library. On Debian and Ubuntu that is:\n"
      "  apt-get install libopenblas-serial-dev\n"
      "Elsewhere, install a static OpenBLAS and name the file:\n"
      "  pip install . --config-settings=cmake.define.SONICMOE_OPENBLAS=/path/to/libopenblas.a\n"
      "  cmake -DSONICMOE_OPENBLAS=/path/to/libopenblas.a\n")
  endif()
  add_library(sonicmoe_openblas OBJECT ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/private_openblas.cpp)
  target_compile_options(sonicmoe_openblas PRIVATE -fno-sanitize=all)
  add_custom_command(
    OUTPUT ${object}
    # Ours comes first: what it defines is not taken from the archive.
    COMMAND ${CMAKE_LINKER} -r -o ${object}.all.o --wrap=blas_memory_alloc --wrap=blas_memory_free
            -u cblas_sgemm $<TARGET_OBJECTS:sonicmoe_openblas> ${SONICMOE_OPENBLAS}
    # GNU's objcopy asks for the new name of what is to stay global, LLVM's for the old one.
    COMMAND ${CMAKE_OBJCOPY} --strip-debug --redefine-sym cblas_sgemm=sonicmoe_cblas_sgemm
            --keep-global-symbol=sonicmoe_cblas_sgemm --keep-global-symbol=cblas_sgemm
            ${object}.all.o ${object}
    DEPENDS ${SONICMOE_OPENBLAS} $<TARGET_OBJECTS:sonicmoe_openblas>
    COMMENT "Taking sgemm out of OpenBLAS"
    VERBATIM)
endfunction()
