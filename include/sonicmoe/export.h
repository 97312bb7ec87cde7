#pragma once

// Marks what the shared library exports; everything else is hidden.
#define SONICMOE_API [[gnu::visibility("default")]]
