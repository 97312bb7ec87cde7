# private_openblas(<object> <prefix> <function>...)
#
# Makes <object>: the named functions of the static OpenBLAS with all that they need, in one object
# file. The functions are renamed to <prefix><function> and hidden, every other symbol is local. So
# a program that links us may use any BLAS, another OpenBLAS included, without a clash of symbols;
# and an installed static library needs no OpenBLAS.
#
# It is the serial build, which starts no threads. That build hands out its buffers without a lock,
# so its calls of blas_memory_alloc and blas_memory_free go to <prefix>locked_alloc and
# <prefix>locked_free, to be written by whoever links the object around <prefix>blas_memory_alloc
# and <prefix>blas_memory_free.
function(private_openblas object prefix)
  find_library(SONICMOE_OPENBLAS NAMES libopenblas.a REQUIRED PATH_SUFFIXES openblas-serial)
  set(hide "")
  set(take "")
  set(rename "")
  foreach(function IN LISTS ARGN ITEMS blas_memory_alloc blas_memory_free)
    # A symbol takes the strictest visibility of all that mention it.
    string(APPEND hide ".hidden ${function}\n")
    list(APPEND take -u ${function})
    list(APPEND rename --redefine-sym ${function}=${prefix}${function}
         --keep-global-symbol=${prefix}${function})
  endforeach()
  foreach(operation IN ITEMS alloc free)
    list(APPEND take --wrap=blas_memory_${operation})
    list(APPEND rename --redefine-sym __wrap_blas_memory_${operation}=${prefix}locked_${operation})
  endforeach()
  file(CONFIGURE OUTPUT ${object}.s CONTENT "${hide}.section .note.GNU-stack,\"\",@progbits\n")
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${CMAKE_CXX_COMPILER} -c -x assembler -o ${object}.hide.o ${object}.s
    COMMAND ${CMAKE_LINKER} -r -o ${object}.all.o ${object}.hide.o ${take} ${SONICMOE_OPENBLAS}
    COMMAND ${CMAKE_OBJCOPY} --strip-debug ${rename} ${object}.all.o ${object}
    DEPENDS ${SONICMOE_OPENBLAS} ${object}.s
    COMMENT "Taking sgemm out of OpenBLAS"
    VERBATIM)
endfunction()
