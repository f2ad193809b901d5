// SPDX-License-Identifier: Apache-2.0

//! The part of fa2/fa2_c.h and fa2/compat/metal_attention.h that the example calls, and a safe
//! function around it.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::ptr;

/// fa2_metal_attention_params: the 160-byte parameter block of the Metal kernel.
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(non_snake_case)]
pub struct MetalAttentionParams {
    pub B: i32,
    pub H: i32,
    pub D: i32,
    pub qL: i32,
    pub kL: i32,
    pub gqa_factor: i32,
    pub scale: f32,
    pub softcapping: f32,
    pub NQ: i32,
    pub NK: i32,
    pub NQ_aligned: i32,
    pub NK_aligned: i32,
    pub qL_rem: i32,
    pub kL_rem: i32,
    pub qL_off: i32,
    pub pad: i32,
    pub Q_strides: [i64; 3],
    pub K_strides: [i64; 3],
    pub V_strides: [i64; 3],
    pub O_strides: [i64; 3],
}

const _: () = assert!(std::mem::size_of::<MetalAttentionParams>() == 160);

pub const METAL_DO_CAUSAL: u32 = 8;

#[allow(non_snake_case)]
extern "C" {
    fn fa2_version_string() -> *const c_char;
    fn fa2_last_error() -> *const c_char;
    fn fa2_metal_attention_backward(
        Q: *const c_void,
        K: *const c_void,
        V: *const c_void,
        dO: *const c_void,
        L: *const f32,
        Dvec: *const f32,
        mask: *const c_void,
        dQ: *mut f32,
        dK: *mut f32,
        dV: *mut f32,
        params: *const MetalAttentionParams,
        mask_params: *const c_void,
        flags: u32,
        context: *mut c_void,
    ) -> c_int;
}

pub fn version() -> &'static str {
    // SAFETY: a static string in ASCII.
    unsafe { CStr::from_ptr(fa2_version_string()) }
        .to_str()
        .unwrap_or("unknown")
}

/// Inputs of the backward, dense: bf16 bits, and f32 for the statistics.
#[allow(non_snake_case)]
pub struct Inputs<'a> {
    pub Q: &'a [u16],
    pub K: &'a [u16],
    pub V: &'a [u16],
    pub dO: &'a [u16],
    pub L: &'a [f32],
    pub Dvec: &'a [f32],
}

/// dQ is overwritten; dK and dV are added to. The error is fa2's own sentence.
#[allow(non_snake_case)]
pub fn metal_attention_backward(
    inputs: &Inputs,
    params: &MetalAttentionParams,
    flags: u32,
    dQ: &mut [f32],
    dK: &mut [f32],
    dV: &mut [f32],
) -> Result<(), String> {
    let q = (params.B * params.H * params.qL * params.D) as usize;
    let rows = (params.B * params.H * params.qL) as usize;
    let kv = (params.B * params.H / params.gqa_factor * params.kL * params.D) as usize;
    let lengths = [
        ("Q", inputs.Q.len(), q),
        ("dO", inputs.dO.len(), q),
        ("dQ", dQ.len(), q),
        ("K", inputs.K.len(), kv),
        ("V", inputs.V.len(), kv),
        ("dK", dK.len(), kv),
        ("dV", dV.len(), kv),
        ("L", inputs.L.len(), rows),
        ("Dvec", inputs.Dvec.len(), rows),
    ];
    for (name, length, expected) in lengths {
        if length != expected {
            return Err(format!(
                "{name} has {length} elements; it must have {expected}"
            ));
        }
    }
    // SAFETY: the arrays have the lengths that dense strides of these params reach.
    let status = unsafe {
        fa2_metal_attention_backward(
            inputs.Q.as_ptr().cast(),
            inputs.K.as_ptr().cast(),
            inputs.V.as_ptr().cast(),
            inputs.dO.as_ptr().cast(),
            inputs.L.as_ptr(),
            inputs.Dvec.as_ptr(),
            ptr::null(),
            dQ.as_mut_ptr(),
            dK.as_mut_ptr(),
            dV.as_mut_ptr(),
            params,
            ptr::null(),
            flags,
            ptr::null_mut(),
        )
    };
    if status == 0 {
        return Ok(());
    }
    // SAFETY: a string that lives until this thread's next call.
    Err(unsafe { CStr::from_ptr(fa2_last_error()) }
        .to_string_lossy()
        .into_owned())
}
