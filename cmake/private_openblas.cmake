# private_openblas(<object> <prefix> <function>...)
#
# Makes <object>: the named functions of the static OpenBLAS with all that they need, in one object
# file. The functions are renamed to <prefix><function> and hidden, every other symbol is local. So
# a program that links us may use any BLAS, another OpenBLAS included, without a clash of symbols
# and without us changing its thread settings; and an installed static library needs no OpenBLAS.
function(private_openblas object prefix)
  find_library(SONICMOE_OPENBLAS NAMES libopenblas.a REQUIRED PATH_SUFFIXES openblas-serial)
  set(hide "")
  set(take "")
  set(rename "")
  foreach(function IN LISTS ARGN)
    # A symbol takes the strictest visibility of all that mention it.
    string(APPEND hide ".hidden ${function}\n")
    list(APPEND take -u ${function})
    list(APPEND rename --redefine-sym ${function}=${prefix}${function}
         --keep-global-symbol=${prefix}${function})
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
