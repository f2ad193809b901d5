// SPDX-License-Identifier: Apache-2.0

//! Calls the Metal flash-attention backward's parameter block on a CPU, and checks dQ, dK and dV
//! against plain loops in f64.

mod fa2;

/// Heads, kv heads, queries, keys, head dim: causal, so no key lies past the last query.
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const QUERIES: usize = 70;
const KEYS: usize = 70;
const DIM: usize = 64;

fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

fn from_bf16(bits: u16) -> f64 {
    f32::from_bits(u32::from(bits) << 16) as f64
}

/// Reproducible bf16 numbers in (-1, 1).
fn random(count: usize, state: &mut u32) -> Vec<u16> {
    (0..count)
        .map(|_| {
            *state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            to_bf16((*state >> 8) as f32 / 8388608.0 - 1.0)
        })
        .collect()
}

fn dot(a: &[u16], b: &[u16]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(&x, &y)| from_bf16(x) * from_bf16(y))
        .sum()
}

fn row(array: &[u16], index: usize) -> &[u16] {
    &array[index * DIM..(index + 1) * DIM]
}

fn add(to: &mut [f64], index: usize, factor: f64, from: &[u16]) {
    for (sum, &x) in to[index * DIM..(index + 1) * DIM].iter_mut().zip(from) {
        *sum += factor * from_bf16(x);
    }
}

fn relative_l2(actual: &[f32], expected: &[f64]) -> f64 {
    let difference: f64 = actual
        .iter()
        .zip(expected)
        .map(|(&a, &e)| (f64::from(a) - e).powi(2))
        .sum();
    (difference / expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
}

fn main() -> Result<(), String> {
    println!("fa2 {}", fa2::version());
    let mut state = 1;
    let q = random(HEADS * QUERIES * DIM, &mut state);
    let k = random(KV_HEADS * KEYS * DIM, &mut state);
    let v = random(KV_HEADS * KEYS * DIM, &mut state);
    let dout = random(HEADS * QUERIES * DIM, &mut state);
    let scale = 1.0 / (DIM as f64).sqrt();

    // The forward's statistics and the gradients, by the formulas.
    let mut logsumexp = vec![0.0f32; HEADS * QUERIES];
    let mut delta = vec![0.0f32; HEADS * QUERIES];
    let mut dq = vec![0.0f64; q.len()];
    let mut dk = vec![0.0f64; k.len()];
    let mut dv = vec![0.0f64; v.len()];
    for h in 0..HEADS {
        let kv = h / (HEADS / KV_HEADS);
        for i in 0..QUERIES {
            let query = h * QUERIES + i;
            let key = |j: usize| kv * KEYS + j;
            let scores: Vec<f64> = (0..=i)
                .map(|j| scale * dot(row(&q, query), row(&k, key(j))))
                .collect();
            let lse = scores.iter().map(|s| s.exp()).sum::<f64>().ln();
            let p: Vec<f64> = scores.iter().map(|s| (s - lse).exp()).collect();
            let dp: Vec<f64> = (0..=i)
                .map(|j| dot(row(&dout, query), row(&v, key(j))))
                .collect();
            let d: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            logsumexp[query] = lse as f32;
            delta[query] = d as f32;
            for j in 0..=i {
                let ds = scale * p[j] * (dp[j] - d);
                add(&mut dv, key(j), p[j], row(&dout, query));
                add(&mut dq, query, ds, row(&k, key(j)));
                add(&mut dk, key(j), ds, row(&q, query));
            }
        }
    }

    let strides =
        |rows: usize, heads: usize| [(heads * rows * DIM) as i64, (rows * DIM) as i64, DIM as i64];
    let params = fa2::MetalAttentionParams {
        B: 1,
        H: HEADS as i32,
        D: DIM as i32,
        qL: QUERIES as i32,
        kL: KEYS as i32,
        gqa_factor: (HEADS / KV_HEADS) as i32,
        scale: scale as f32,
        softcapping: 1.0,
        NQ: QUERIES.div_ceil(32) as i32,
        NK: KEYS.div_ceil(16) as i32,
        NQ_aligned: (QUERIES / 32) as i32,
        NK_aligned: (KEYS / 16) as i32,
        qL_rem: (QUERIES % 32) as i32,
        kL_rem: (KEYS % 16) as i32,
        Q_strides: strides(QUERIES, HEADS),
        K_strides: strides(KEYS, KV_HEADS),
        V_strides: strides(KEYS, KV_HEADS),
        O_strides: strides(QUERIES, HEADS),
        ..Default::default()
    };
    let inputs = fa2::Inputs {
        Q: &q,
        K: &k,
        V: &v,
        dO: &dout,
        L: &logsumexp,
        Dvec: &delta,
    };
    let mut actual = [
        vec![0.0f32; q.len()],
        vec![0.0f32; k.len()],
        vec![0.0f32; v.len()],
    ];
    let [dq_actual, dk_actual, dv_actual] = &mut actual;
    fa2::metal_attention_backward(
        &inputs,
        &params,
        fa2::METAL_DO_CAUSAL,
        dq_actual,
        dk_actual,
        dv_actual,
    )?;

    // 2.5e-3: what fa2 promises where P and dS are rounded to bf16.
    for (name, actual, expected) in [
        ("dQ", &actual[0], &dq),
        ("dK", &actual[1], &dk),
        ("dV", &actual[2], &dv),
    ] {
        let error = relative_l2(actual, expected);
        println!("{name}: relative L2 error {error:.2e}");
        if error > 2.5e-3 {
            return Err(format!(
                "{name} is off by {error:.2e}; it must be within 2.5e-3"
            ));
        }
    }

    // What does not fit is refused with a sentence, and nothing is written.
    let wrong = fa2::MetalAttentionParams {
        softcapping: 30.0,
        ..params
    };
    let [dq_actual, dk_actual, dv_actual] = &mut actual;
    match fa2::metal_attention_backward(&inputs, &wrong, 0, dq_actual, dk_actual, dv_actual) {
        Ok(()) => Err("softcapping 30 was accepted".to_string()),
        Err(sentence) => {
            println!("refused: {sentence}");
            Ok(())
        }
    }
}
