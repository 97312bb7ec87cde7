#pragma once

// Everything public: #include <sonicmoe/sonicmoe.h>.
#include "sonicmoe/combine.h"
#include "sonicmoe/experts.h"
#include "sonicmoe/info.h"
#include "sonicmoe/layer.h"
#include "sonicmoe/ops.h"
#include "sonicmoe/router.h"
#include "sonicmoe/status.h"
#include "sonicmoe/token_rounding.h"
#include "sonicmoe/types.h"
