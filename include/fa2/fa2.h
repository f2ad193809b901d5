// SPDX-License-Identifier: Apache-2.0

// All of fa2's C++ interface. fa2/fa2_c.h is the C interface, and the headers
// of fa2/compat/ are entry points with the parameters of other kernels.
#ifndef FA2_FA2_H_
#define FA2_FA2_H_

#include "fa2/attention.h"     // IWYU pragma: export
#include "fa2/block_mask.h"    // IWYU pragma: export
#include "fa2/context.h"       // IWYU pragma: export
#include "fa2/export.h"        // IWYU pragma: export
#include "fa2/reference.h"     // IWYU pragma: export
#include "fa2/status.h"        // IWYU pragma: export
#include "fa2/training_ops.h"  // IWYU pragma: export
#include "fa2/types.h"         // IWYU pragma: export
#include "fa2/version.h"       // IWYU pragma: export

#endif  // FA2_FA2_H_
