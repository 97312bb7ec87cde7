#pragma once

/// @file
/// Everything public: `#include <sonicmoe/sonicmoe.h>`.

/// @mainpage sonicmoe
///
/// Start at sonicmoe::LayerDesc and sonicmoe::LayerPlan, a whole layer. sonicmoe::RouterPlan,
/// sonicmoe::ExpertsPlan and sonicmoe::CombinePlan are its three parts, and ops.h has each
/// operation by itself. sonicmoe::Status says how errors come back.
///
/// @section growth What may change
///
/// Before 1.0 a minor version may break the API; patch versions do not.
///
/// Structs whose names end in Desc, Args, Info or Spec, and Options and SavedBytes, may grow in any
/// version, and new fields may stand between old ones. Initialise them by name, in the order of
/// declaration, `{.tokens = 4096, .router = {.experts = 32, .top_k = 4}}`, or assign fields. A
/// field that you leave out keeps its default, and a new field's default is what the library did
/// before. Device, Stream and Workspace do not grow.
///
/// Enumerators keep their values, and new ones may be added: give a switch over them a default.
#include "sonicmoe/combine.h"
#include "sonicmoe/experts.h"
#include "sonicmoe/info.h"
#include "sonicmoe/layer.h"
#include "sonicmoe/ops.h"
#include "sonicmoe/router.h"
#include "sonicmoe/status.h"
#include "sonicmoe/token_dispatch.h"
#include "sonicmoe/token_rounding.h"
#include "sonicmoe/types.h"
