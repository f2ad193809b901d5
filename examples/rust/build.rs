// SPDX-License-Identifier: Apache-2.0

//! Links the installed fa2: from the folder in FA2_LIB_DIR, or as pkg-config says.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=FA2_LIB_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let folder = env::var("FA2_LIB_DIR").unwrap_or_else(|_| {
        let output = Command::new("pkg-config")
            .args(["--variable=libdir", "fa2"])
            .output()
            .expect("set FA2_LIB_DIR to the folder of libfa2, or install pkg-config");
        assert!(
            output.status.success(),
            "pkg-config does not know fa2: set FA2_LIB_DIR or PKG_CONFIG_PATH"
        );
        String::from_utf8(output.stdout)
            .expect("a path in UTF-8")
            .trim()
            .to_string()
    });
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-lib=dylib=fa2");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
}
