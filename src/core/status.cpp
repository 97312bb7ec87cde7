#include "sonicmoe/status.h"

#include <cstdarg>
#include <cstdio>

namespace sonicmoe {

Status Status::error(StatusCode code, const char* format, ...) noexcept {
  Status status;
  status.code_ = code;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.text_, sizeof(status.text_), format, arguments);
  va_end(arguments);
  return status;
}

Status Status::device(int device_code, const char* what) noexcept {
  Status status = error(StatusCode::device_error, "device error %d: %s", device_code, what);
  status.device_code_ = device_code;
  return status;
}

}  // namespace sonicmoe
