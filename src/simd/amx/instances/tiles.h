// SPDX-License-Identifier: Apache-2.0

// The class of tile registers that these units are compiled for. Tests compile
// the same files with the registers in software.
#ifndef FA2_SRC_SIMD_AMX_INSTANCES_TILES_H_
#define FA2_SRC_SIMD_AMX_INSTANCES_TILES_H_

#ifndef FA2_AMX_TILES
#define FA2_AMX_TILES HardwareTiles
#endif

#endif  // FA2_SRC_SIMD_AMX_INSTANCES_TILES_H_
