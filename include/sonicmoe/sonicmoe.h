#pragma once

// Everything public: #include <sonicmoe/sonicmoe.h>.
#include "sonicmoe/info.h"
#include "sonicmoe/layer.h"
#include "sonicmoe/ops.h"
#include "sonicmoe/status.h"
#include "sonicmoe/token_rounding.h"
#include "sonicmoe/types.h"
