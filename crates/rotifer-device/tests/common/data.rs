//! Moving data.

use proptest::prelude::*;
use rotifer_device::{Device, Dtype};

use super::numbers::Numbers;
use super::*;

pub fn check_fill_copy_add(devices: &[&dyn Device]) {
    for_all(devices, (lengths(), any::<u64>()), |field, (n, seed)| {
        let numbers = &mut Numbers::new(*seed);
        let (x, y) = (numbers.normals(*n), numbers.normals(*n));
        let ints: Vec<i32> = (0..*n).map(|_| numbers.below(1 << 31) as i32).collect();
        let (x_at, y_at, room) = (field.floats(&x), field.floats(&y), field.floats(&x));
        field.call(&[flat(y_at)], |device| device.add(x_at, y_at));
        let want: Vec<f64> = x.iter().zip(&y).map(|(x, y)| f64::from(x + y)).collect();
        assert_eq!(field.values(y_at), want, "one addition, rounded once");
        field.call(&[flat(room)], |device| device.fill(room, -0.75));
        assert_eq!(field.values(room), vec![-0.75; *n]);
        field.call(&[flat(room)], |device| device.copy(x_at, room));
        assert_eq!(field.values(room), wide(&x));
        field.call(&[], |device| device.copy(x_at, x_at));
        let ints_at = field.ints(&ints);
        field.call(&[flat(room)], |device| device.copy(ints_at, room.cast(Dtype::I32)));
        let bits: Vec<f32> = ints.iter().map(|&i| f32::from_bits(i.cast_unsigned())).collect();
        let mut copied = vec![0.0; *n];
        field.device.read_f32(room, &mut copied);
        assert!(copied.iter().zip(&bits).all(|(a, b)| a.to_bits() == b.to_bits()));
    });
}

pub fn check_doubles(device: &dyn Device) {
    let field = Field::new(device);
    let x = field.double(0.0);
    field.call(&[], |device| device.fill(x, 0.1));
    assert_eq!(field.double_value(x), f64::from(0.1_f32));
    let neighbour = field.doubles.slice(2..3);
    device.write_f64(&[1.0 / 3.0], x);
    device.add(neighbour, x);
    assert_eq!(field.double_value(x), 1.0 / 3.0 + 2.5);
    device.copy(neighbour, x);
    assert_eq!(field.double_value(x), 2.5);
}
